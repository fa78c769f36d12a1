"""Replays of conversations find mixed-up samples."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.chats import CLOSE, VOCABULARY, Partner, chat_tokenizer, look, read_calls
from kit.evidence import evidence_of
from typing_extensions import override

from lightning_rl import FakeEngine, FinishReason, SamplingParams
from lightning_rl.audit import CHECKS, environment_repeats
from lightning_rl.audit.conversation_evidence import AuditedConversation
from lightning_rl.audit.environment_repeats import Replay, replay_of
from lightning_rl.data import Prompt
from lightning_rl.environments import (
    Action,
    ConversationLimits,
    StepResult,
    TokenStep,
    ToolEnvironment,
    converse,
)
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Request, request_seed
from lightning_rl.samples import Trajectory

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
) -> Replay | str:
    """Return the replay of conversations with an environment, or the reason why there is none."""
    made = environments(factory, **options)
    said = replay_of(made, "environment", change(conversations_with(made)))
    return said.reason or said


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
    said = replay(factory)
    assert isinstance(said, Replay) and (said.moving, said.others) == ("", [])
    assert (said.environment, sorted(said.samples)) == (factory.__name__, [0, 1, 2, 3])


def test_tools_say_the_same_again_call_by_call() -> None:
    said = replay(tools, tool_parser=read_calls)
    assert isinstance(said, Replay) and (said.moving, said.others) == ("", [])


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
    said = replay(factory, change)
    assert isinstance(said, Replay) and not said.moving
    assert slip in {what for _, what in said.others}


def test_nothing_is_said_of_what_reaches_out_or_opts_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = environments(Writing)
    conversations = conversations_with(made)
    Path("log").write_text("of the run")
    reason = replay_of(made, "environment", conversations).reason
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
    assert isinstance(replay(lambda: (made.append("one"), Partner())[1]), Replay)
    assert len(made) == 4, "one for each conversation of the run"
    monkeypatch.setattr(environment_repeats, "MAX_SECONDS", -1.0)
    assert "more than -1 s" in str(replay(Partner))


def judge(*replays: Replay) -> list[str]:
    evidence = replace(evidence_of(), replays=replays)
    return [f"{finding.culprit}: {finding.observed}" for finding in CHECKS["environment_replays"](evidence)]


def test_who_is_named() -> None:
    assert judge(Replay("Shop", samples=[1, 2])) == []
    assert judge(Replay("Shop", samples=[1, 2], moving="rewards")) == [
        "environment Shop: other rewards when it is repeated"
    ]
    (found,) = judge(Replay("Shop", samples=[1, 2], others=[(1, "messages"), (2, "reward")]))
    assert found.startswith("stage generate") and found.endswith("others in 2 of 2: messages, reward")
    evidence = replace(evidence_of(), replays=[Replay("Shop", "it is too slow")])
    assert CHECKS["environment_replays"].judge(evidence).skipped == {"environment_replays": "it is too slow"}
