"""Metrics of conversations, counted by hand and by the audit."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.chats import Partner, look
from kit.evidence import evidence_of

from lightning_rl import FinishReason, SamplingParams, Stat
from lightning_rl.audit import CHECKS
from lightning_rl.audit.conversation_evidence import AuditedConversation, conversation_figures
from lightning_rl.environments import ToolEnvironment
from lightning_rl.generation import Completion, Request

CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": "red"}}}


def conversation(
    *turns: tuple[int, int],
    finish: FinishReason = FinishReason.STOP,
    reward: float | None = None,
    name: str = "environment",
) -> AuditedConversation:
    """Return a conversation from prefix and answer lengths; each answer but the last has two calls."""
    sampling = SamplingParams(max_new_tokens=8, eos_token_ids=(9,))
    pairs = [
        (
            Request(prefix_ids=(2,) * prefix, sample_id=5, seed=0, sampling=sampling, turn=turn),
            Completion(token_ids=(2,) * drawn, logprobs=None, version=0, finish=FinishReason.STOP),
        )
        for turn, (prefix, drawn) in enumerate(turns)
    ]
    said: list[Any] = [{"role": "user", "content": "?"}]
    for turn, _ in enumerate(turns, 1):
        said.append({"role": "assistant", "content": "!", "tool_calls": [CALL, CALL] if turn < len(turns) else []})
    return AuditedConversation(5, 1, name, {}, pairs, said, reward, (), finish)


def values(conversations: list[AuditedConversation], **factories: Any) -> dict[str, tuple[float, float]]:
    """Return mean and population of each metric."""
    figures = conversation_figures(conversations, factories)
    return {name: (round(stat.value(), 6), float(stat.moments[0])) for name, stat in figures.items()}


def test_what_is_logged_of_conversations() -> None:
    conversations = [
        conversation((3, 2), (9, 2), reward=1.0),  # four tokens between
        conversation((3, 2), (6, 2), (11, 1), finish=FinishReason.TURNS, reward=0.0),  # one and three
        conversation((3, 2), finish=FinishReason.LENGTH),
        conversation(finish=FinishReason.FAILED),
    ]
    assert values(conversations, environment=Partner) == {
        "env/turns": (1.5, 4.0),
        "env/tokens": (2.0, 4.0),
        "env/failed": (0.25, 4.0),
        "env/cut_by_turns": (0.25, 4.0),
        "env/cut_by_tokens": (0.25, 4.0),
        "env/reward": (0.5, 2.0),
    }


def test_figures_of_turns_are_left_out_where_some_turns_are_unknown() -> None:
    known, unknown = conversation((3, 2), (9, 2)), conversation(reward=1.0)
    figures = conversation_figures([known, unknown], {"environment": Partner}, has_turns=False)
    assert list(figures) == ["env/failed", "env/cut_by_turns", "env/cut_by_tokens", "env/reward"]


def test_a_rewritten_context_counts_whole_even_where_it_goes_on_as_before() -> None:
    rewritten = conversation((3, 2), (9, 2), (4, 1), (6, 1))._replace(
        rewrites=frozenset({2, 3})
    )  # all of 9, all of 4, one
    assert values([rewritten], environment=Partner)["env/tokens"] == (14.0, 1.0)


def test_what_is_read_behind_each_of_two_equal_answers_counts_twice_and_for_a_third_call_not_again() -> None:
    forked = conversation((3, 2), (3, 2), (7, 1), (7, 1), (7, 1))
    assert values([forked], environment=Partner)["env/tokens"] == (4.0, 1.0)


def test_calls_are_counted_where_nobody_else_gives_figures_of_them() -> None:
    tools, conversations = partial(ToolEnvironment, (look,)), [conversation((3, 2), (9, 2)), conversation((3, 2))]
    assert values(conversations, environment=tools)["env/tool_calls"] == (1.0, 2.0)
    assert "env/tool_calls" not in values(
        [*conversations, conversation((3, 2), finish=FinishReason.FAILED)], environment=tools
    )
    assert "env/tool_calls" not in values(conversations, environment=Partner)


def test_several_environments_have_names_of_their_own() -> None:
    found = values(
        [conversation((3, 2), name="shop"), conversation((3, 2), (9, 2), name="guess")], shop=Partner, guess=Partner
    )
    assert (found["env/shop/turns"], found["env/guess/turns"]) == ((1.0, 1.0), (2.0, 1.0))
    assert values([], environment=Partner) == {}


@pytest.mark.parametrize(("logged", "found"), [(-3.0, []), (-3.001, []), (-2.5, ["metric env/logprob"])])
def test_the_log_probability_of_words_is_held_against_the_policys(logged: float, found: list[str]) -> None:
    moments = Stat.of(torch.tensor([logged]), torch.tensor([True])).moments
    step: Any = SimpleNamespace(logged={"env/logprob": [moments]}, rows=evidence_of().rows)
    evidence = replace(evidence_of(), step=step, words_logprob=-3.0)
    assert [finding.culprit for finding in CHECKS["environment_logprob"](evidence)] == found
    unknown = replace(evidence, words_logprob=None)
    assert "environment_logprob" in CHECKS["environment_logprob"].judge(unknown).skipped
