"""Conversations on servers: scheduling by prefix, lost servers, and syncs between turns."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from generation.vllm.served_engines import an_engine
from kit.conversations import response_of, wanted
from kit.scripted_server import VOCABULARY, Answer, ScriptedServer, servers
from kit.support import tiny_model
from typing_extensions import override

from lightning_rl import EngineError, FinishReason, SamplingParams, VLLMServerEngine
from lightning_rl.environments import (
    Conversation,
    ConversationLimits,
    TokenEnvironment,
    TokenStep,
    converse,
)
from lightning_rl.generation import Request
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.samples import Trajectory

TURNS = 4


class Echo(TokenEnvironment):
    """Environment that replies with one token in each turn."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.before, self.turn, self.closed = before, 0, 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.before(self.turn)
        self.turn += 1
        return TokenStep(token_ids=[2 + self.turn])

    @override
    def close(self) -> None:
        self.closed += 1


def opening(number: int, environment: Echo | None = None) -> Conversation:
    sampling = SamplingParams(max_new_tokens=40, temperature=0.7, eos_token_ids=())
    first = Request(prefix_ids=(2, 3 + number // 3), sample_id=number, seed=number, sampling=sampling)
    limits = ConversationLimits(turns=TURNS, turn_tokens=4)
    return Conversation(environment or Echo(), wanted(first), limits, seed=number)


def held(engine: VLLMServerEngine, talks: list[Conversation]) -> list[Trajectory]:
    answers = Answers(engine, logprobs=True, vocabulary=VOCABULARY)
    return converse(talks, engine, logprobs=True, answers=answers)


def tokens(trajectories: Sequence[Trajectory]) -> list[tuple[tuple[int, ...], FinishReason]]:
    return [(response_of(each), each.finish) for each in trajectories]


def which(body: dict[str, Any]) -> tuple[int, int]:
    """Return sample and turn of a request."""
    sample, turn = body["request_id"].split("-")[1:3]
    return int(sample), int(turn)


def asked(server: ScriptedServer) -> list[tuple[int, int]]:
    return [which(body) for body in server.requests]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[tuple[int, ...], FinishReason]]:
    server = ScriptedServer()
    with servers(server):
        engine = an_engine(server)
        found = tokens(held(engine, [opening(n) for n in range(12)]))
        engine.close()
    assert {finish for _, finish in found} == {FinishReason.TURNS} and len(found[0][0]) == TURNS * 5 - 1
    return found


@pytest.mark.nightly
def test_the_turns_of_a_group_are_at_one_server(undisturbed: Any) -> None:
    one, two = ScriptedServer(), ScriptedServer()
    with servers(one, two):
        engine = an_engine(one, two)
        assert tokens(held(engine, [opening(n) for n in range(12)])) == undisturbed
        engine.close()
    samples = [{sample for sample, _ in asked(server)} for server in (one, two)]
    assert not samples[0] & samples[1] and samples[0] | samples[1] == set(range(12))
    assert [{sample // 3 for sample in each} for each in samples] == [{0, 2}, {1, 3}], "groups of three"
    assert sorted(asked(one) + asked(two)) == [(n, turn) for n in range(12) for turn in range(TURNS)]
    prefixes = {which(body): body["token_ids"] for body in one.requests + two.requests}
    said = undisturbed[5][0]
    assert [prefixes[5, turn] for turn in range(TURNS)] == [[2, 4, *said[: 5 * turn]] for turn in range(TURNS)]


def test_a_conversation_whose_server_is_lost_continues_at_another(undisturbed: Any) -> None:
    def deadly(body: dict[str, Any], answer: Answer) -> Answer:
        if which(body)[1] == 2:
            one.kill()
        return answer

    one, two = ScriptedServer(deadly), ScriptedServer()
    with servers(one, two):
        engine = an_engine(one, two)
        assert tokens(held(engine, [opening(n) for n in range(12)])) == undisturbed
        moved = {sample for sample, turn in asked(one) if turn == 2}
        assert moved and {(sample, 3) for sample in moved} <= set(asked(two)) and (0, 3) not in set(asked(one))
        engine.close()


def test_conversations_do_not_wait_for_each_other(undisturbed: Any) -> None:
    ended = threading.Event()

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        if which(body) == (11, TURNS - 1):
            ended.set()
        assert which(body) != (0, 0) or ended.wait(20), "the first turn of a sample ends after the last of another"
        return answer

    server = ScriptedServer(script)
    with servers(server):
        engine = an_engine(server)
        assert tokens(held(engine, [opening(n) for n in range(12)])) == undisturbed
        engine.close()


def test_a_sync_between_two_turns_changes_the_version_of_later_tokens() -> None:
    server = ScriptedServer()
    with servers(server):
        engine, model = an_engine(server), tiny_model("llama", 1, dtype=torch.float32)

        def sync(turn: int) -> None:
            if turn == 1:
                engine.load_weights(model.named_parameters(), 5)

        (trajectory,) = held(engine, [opening(0, Echo(sync))])
        engine.close()
    assert [segment.versions for segment in trajectory.segments if segment.sampled] == [(0,), (0,), (5,), (5,)]


def test_a_failure_cancels_the_others_and_closes_every_environment() -> None:
    gate, environments = threading.Event(), [Echo() for _ in range(5)]

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        if which(body) == (2, 1):
            server.until(lambda known: len(known.requests) >= 6)
            return 400
        assert which(body)[0] == 2 or gate.wait(20)
        return answer

    server = ScriptedServer(script)
    with servers(server):
        engine = an_engine(server)
        with pytest.raises(EngineError, match=r"request 2-1, but it rejected it: .* status 400"):
            held(engine, [opening(n, environment) for n, environment in enumerate(environments)])
        assert [environment.closed for environment in environments] == [1] * 5
        gate.set()
        server.until(lambda known: known.cut == 4)
        server.script = lambda _, answer: answer
        assert len(held(engine, [opening(n) for n in range(3)])) == 3, "the engine still works"
        engine.close()
