"""Replays of conversations find mixed-up samples."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.chats import CLOSE, VOCABULARY, Partner, chat_tokenizer, look, read_calls
from kit.evidence import evidence_of
from typing_extensions import override

from lightning_rl import FakeEngine, FinishReason, SamplingParams
from lightning_rl.audit import CHECKS, environment_repeats
from lightning_rl.audit.conversation_evidence import AuditedConversation
from lightning_rl.audit.environment_repeats import replay_of
from lightning_rl.data import Prompt
from lightning_rl.environments import (
    Action,
    ConversationLimits,
    Message,
    StepResult,
    TokenStep,
    ToolEnvironment,
    converse,
)
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Request, request_seed
from lightning_rl.samples import Trajectory
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.utils.finding import Finding

SAMPLING = SamplingParams(max_new_tokens=12, eos_token_ids=CLOSE)
SAID = ("red one", "look", "two ? green", "blue red")


def environments(factory: Callable[[], Any], **options: Any) -> Environments:
    named = dict[str, Any](tokenizer=chat_tokenizer(), close=frozenset(CLOSE), limits=ConversationLimits(turns=3))
    return Environments(factories={"environment": factory}, seed=3, **named | options)


def answer(request: Request) -> list[int]:
    """Return token ids by sample and turn."""
    return [*map(VOCABULARY.index, SAID[(request.sample_id + request.turn) % 4].split()), CLOSE[0]]


def conversations_with(made: Environments, samples: int = 4) -> list[AuditedConversation]:
    """Return conversations of a run, two per prompt."""
    prompts = [
        Prompt(place, (3, 4), [{"role": "user", "content": f"say {place} ?"}], {"place": place})
        for place in (sample // 2 for sample in range(samples))
    ]
    firsts = [
        Request(prefix_ids=(3, 4), sample_id=sample, seed=request_seed(3, 0, sample), sampling=SAMPLING)
        for sample in range(samples)
    ]
    engine = FakeEngine(answer)
    engine.load_weights([], 0)
    conversations = [
        made.open(Trajectory(prompt=prompt, request=first)) for prompt, first in zip(prompts, firsts, strict=True)
    ]
    told = converse(conversations, engine)
    return [
        AuditedConversation(
            sample=first.sample_id,
            group=prompt.index,
            environment="environment",
            row={**prompt.columns, "prompt": prompt.content},
            turns=conversation.pairs,
            messages=one.messages,
            reward=one.environment_reward,
            judged=one.answer,
            finish=one.finish,
        )
        for prompt, first, conversation, one in zip(prompts, firsts, conversations, told, strict=True)
    ]


def replay(
    factory: Callable[[], Any],
    change: Callable[[list[AuditedConversation]], list[AuditedConversation]] = list,
    **options: Any,
) -> list[Finding] | Skip:
    """Return the findings about conversations repeated with an environment, or the reason why there are none."""
    made = environments(factory, **options)
    return replay_of(made, "environment", change(conversations_with(made)))


class Scored(Partner):
    """Returns a final reward when a limit ends the conversation."""

    @override
    def reward(self) -> float | None:
        return 0.5


class Echo:
    """An environment in token ids."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Return the row's prompt."""
        del row, seed
        self.turn = 0
        return ()

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Repeat an answer, three times."""
        del finish
        self.turn += 1
        return TokenStep(token_ids=token_ids, reward=0.25, done=self.turn == 3)

    def close(self) -> None:
        """Do nothing."""


class Writing(Partner):
    """Writes a log file."""

    @override
    def step(self, answer: Action) -> StepResult:
        Path("log").write_text(answer.text)
        return super().step(answer)


class Once(Partner):
    """Is declared as not replayable."""

    replayable = False


def tools() -> ToolEnvironment:
    return ToolEnvironment([look])


@pytest.mark.parametrize("factory", [Partner, Scored, Echo])
def test_environments_that_are_one_conversations_own_say_the_same_again(factory: Any) -> None:
    assert replay(factory) == []


def test_tools_say_the_same_again_call_by_call() -> None:
    assert replay(tools, tool_parser=read_calls) == []


def exchange(field: str) -> Callable[[list[AuditedConversation]], list[AuditedConversation]]:
    return lambda conversations: [
        conversation._replace(**{field: getattr(other, field)})
        for conversation, other in zip(conversations, conversations[::-1], strict=True)
    ]


@pytest.mark.parametrize(
    ("factory", "change", "slip"),
    [
        (Partner, exchange("messages"), "messages"),
        (Partner, exchange("group"), "messages"),
        (Echo, lambda conversations: [conversation._replace(reward=1.0) for conversation in conversations], "reward"),
        (
            Echo,
            lambda conversations: [
                conversation._replace(turns=conversation.turns[:2] * 2) for conversation in conversations
            ],
            "end",
        ),
        (
            Echo,
            lambda conversations: [
                conversation._replace(turns=[conversation.turns[0], *conversation.turns[:2]])
                for conversation in conversations
            ],
            "token ids",
        ),
    ],
)
def test_conversations_that_were_recorded_otherwise_are_found(factory: Any, change: Any, slip: str) -> None:
    (found,) = cast(list[Finding], replay(factory, change))
    assert found.culprit.startswith("stage generate") and f"the conversation of {factory.__name__}" in found.expected
    assert slip in found.observed and set(found.samples) <= {0, 1, 2, 3}


def test_a_conversation_of_most_turns_is_repeated_in_every_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_repeats, "MAX_CONVERSATIONS", 1)
    made, data = environments(Partner), cast(Any, SimpleNamespace(pass_length=None))
    *others, longest = conversations_with(made)
    conversations = [*(other._replace(turns=other.turns[:1]) for other in others), longest._replace(reward=9.0)]
    for number in range(4):
        (found,) = cast(list[Finding], environment_repeats.ReplayWatch().ask(made, data, conversations, number))
        assert found.samples == [longest.sample] and found.observed.endswith("reward")


def test_nothing_is_said_of_what_reaches_out_or_opts_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = environments(Writing)
    conversations = conversations_with(made)
    Path("log").write_text("of the run")
    reason = cast(Skip, replay_of(made, "environment", conversations)).why
    assert "accesses something outside of its process (open)" in reason and reason.endswith(
        "test it with lightning_rl.testing.check_environment"
    )
    assert Path("log").read_text() == "of the run"
    Path("log").write_text("is open again")
    assert "is not replayable" in str(replay(Once))
    assert "holds state that cannot be copied" in str(replay(partial(partner_beside, threading.Lock())))


def partner_beside(lock: object) -> Partner:
    del lock
    return Partner()


class Exiting(Partner):
    """Exits at an answer that is not from the run."""

    @override
    def step(self, answer: Action) -> StepResult:
        return sys.exit(3) if "unheard" in answer.text else super().step(answer)


def test_an_environment_that_ends_the_program_is_skipped_with_the_reason() -> None:
    assert "could not be repeated: SystemExit: 3" in str(replay(Exiting))


def test_what_a_factory_keeps_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    assert replay(lambda: (made.append("one"), Partner())[1]) == []
    assert len(made) == 4, "one for each conversation of the run"
    monkeypatch.setattr(environment_repeats, "MAX_SECONDS", -1.0)
    assert "more than -1 s" in str(replay(Partner))


class Counting(Partner):
    """Counts the conversations of its class in its first message."""

    begun = 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        type(self).begun += 1
        return [{"role": "user", "content": f"say {'one ' * type(self).begun}?"}]


def test_an_environment_that_changes_when_it_is_repeated_is_the_culprit_and_the_check_reports_it() -> None:
    replays = [*cast(list[Finding], replay(Counting)), Skip("it is too slow")]
    verdict = CHECKS["environment_replays"].judge(replace(evidence_of(), replays=replays))
    (found,) = verdict.findings
    assert (found.culprit, found.observed) == ("environment Counting", "other words when it is repeated")
    assert verdict.skipped == {"environment_replays": "it is too slow"}
