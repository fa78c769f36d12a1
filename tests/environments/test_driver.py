"""Play: what is drawn depends neither on the driver nor on order, batch, threads or which environment is slow."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.conversations import response_of, wanted
from kit.engine_requests import launch
from kit.support import tiny_policy
from torch import Tensor
from typing_extensions import override

from lightning_rl import Engine, EngineError, FakeEngine, FinishReason, SamplingParams, TransformersEngine
from lightning_rl.environments import (
    Conversation,
    ConversationLimits,
    TokenEnvironment,
    TokenStep,
    converse,
)
from lightning_rl.generation import Capabilities, Completion, Request
from lightning_rl.generation import engine as engine_module
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.processes.pool import BLOCKED
from lightning_rl.samples import Trajectory

EOS = 9
What = list[tuple[tuple[int, ...], FinishReason, list[Tensor | None]]]


class Echo(TokenEnvironment):
    """Says a token that its seed and the turn decide, after a pause that is another each time it runs."""

    def __init__(self, turns: int = 3, pause: float = 0.0) -> None:
        self.turns, self.pause, self.closed = turns, pause, 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        self.seed, self.turn = seed, 0
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        time.sleep(random.Random().random() * self.pause)
        self.turn += 1
        said = 2 + (self.seed * 7 + self.turn + sum(token_ids)) % 6
        return TokenStep(done=True, reward=1.0) if self.turn == self.turns else TokenStep(token_ids=[said] * 2)

    @override
    def close(self) -> None:
        self.closed += 1


def opening(number: int, environment: Any = None, **limits: Any) -> Conversation:
    sampling = SamplingParams(max_new_tokens=18, eos_token_ids=[EOS])
    prefix = tuple(2 + (number * k) % 5 for k in range(1, 2 + number % 4))
    request = Request(prefix_ids=prefix, sample_id=number, seed=1000 + number, sampling=sampling)
    environment = Echo(1 + number % 4, pause=0.002) if environment is None else environment
    options = ConversationLimits(**{"turn_tokens": 5, **limits})
    return Conversation(environment, wanted(request), options, seed=number)


def openings(number: int = 12) -> list[Conversation]:
    return [opening(n) for n in range(number)]


def what(trajectories: Sequence[Trajectory]) -> What:
    return [
        (
            (*each.request.prefix_ids, *response_of(each)),
            each.finish,
            [segment.logprobs for segment in each.segments if segment.sampled],
        )
        for each in trajectories
    ]


def same(one: What, other: What, *, within: float) -> None:
    """Ids and ends are equal, and log-probabilities as well but for so much."""
    assert [row[:2] for row in one] == [row[:2] for row in other]
    for (*_, ours), (*_, theirs) in zip(one, other, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert left is not None and right is not None
            assert (left - right).abs().max() <= within


def synced(engine: Engine) -> Engine:
    model = tiny_policy()
    launch(engine, model)
    engine.load_weights(model.named_parameters(), 0)
    return engine


def told(script: Callable[[Request], Completion | Sequence[int]], engine: type[FakeEngine] = FakeEngine) -> FakeEngine:
    made = engine(script)
    made.load_weights([], 0)
    return made


def test_the_embedded_engine_draws_the_same_in_any_batch_order_and_number_of_threads() -> None:
    engine = synced(TransformersEngine())
    expected = what(converse(openings(), engine, logprobs=True))
    assert len({row[0] for row in expected}) == 12 and {row[1] for row in expected} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert {len(row[2]) for row in expected} == {1, 2, 3, 4}
    same(what(converse(openings()[::-1], engine, logprobs=True))[::-1], expected, within=0.0)
    for _ in range(3):
        with ThreadPoolExecutor(6) as executor:
            same(what(converse(openings(), engine, logprobs=True, executor=executor)), expected, within=0.0)
    same(what(converse(openings(), synced(TransformersEngine(max_rows=1)), logprobs=True)), expected, within=5e-6)
    for limit in (1, 5):
        same(what(converse(openings(), engine, logprobs=True, limit=limit)), expected, within=5e-6)


class Noting(FakeEngine):
    """Stores the sample and turn of each request of a round."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.rounds = list[list[tuple[int, int]]]()

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.rounds.append([(request.sample_id, request.turn) for request in requests])
        return super().generate_batch(requests, logprobs=logprobs)


@pytest.mark.parametrize(
    ("limit", "rounds"),
    [
        (None, [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(2, 2)]]),
        (2, [[(0, 0), (1, 0)], [(0, 1), (2, 0)], [(2, 1)], [(2, 2)]]),
        (1, [[(0, 0)], [(0, 1)], [(1, 0)], [(2, 0)], [(2, 1)], [(2, 2)]]),
    ],
)
def test_conversations_that_wait_draw_together_and_come_back_in_their_order(limit: int | None, rounds: Any) -> None:
    engine = told(lambda _: (EOS,), Noting)
    talks = [opening(number, Echo(turns)) for number, turns in enumerate((2, 1, 3))]
    assert [each.metrics["turns"] for each in converse(talks, engine, limit=limit)] == [2, 1, 3]
    assert isinstance(engine, Noting) and engine.rounds == rounds


def test_who_comes_too_late_joins_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LINGER", 0.2)
    drawn_twice = threading.Event()

    class Late(Echo):
        @override
        def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            assert drawn_twice.wait(20), "the others wait for the late one"
            return super().step(token_ids, finish)

    def script(request: Request) -> tuple[int, ...]:
        if (request.sample_id, request.turn) == (1, 1):
            drawn_twice.set()
        return (3, EOS)

    engine = told(script, Noting)
    with ThreadPoolExecutor(2) as executor:
        converse([opening(0, Late(2)), opening(1, Echo(2))], engine, executor=executor)
    assert isinstance(engine, Noting) and engine.rounds == [[(0, 0), (1, 0)], [(1, 1)], [(0, 1)]]


def test_a_conversation_that_waits_for_a_worker_delays_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LINGER", 20.0)
    ended = threading.Event()

    class Waits(Echo):
        @override
        def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
            BLOCKED.get()(1)
            assert ended.wait(10), "the round waits for the worker"
            BLOCKED.get()(-1)
            return super().reset(row, seed)

    class Holds(Echo):
        @override
        def close(self) -> None:
            ended.set()

    with ThreadPoolExecutor(2) as executor:
        talks = converse([opening(0, Waits(1)), opening(1, Holds(2))], told(lambda _: (EOS,)), executor=executor)
    assert [talk.failure for talk in talks] == [None, None]


@pytest.mark.parametrize("workers", [0, 4])
def test_an_engine_that_fails_leaves_no_environment_open(workers: int) -> None:
    environments = [Echo(4) for _ in range(6)]

    def script(request: Request) -> tuple[int, ...]:
        if request.turn == 2:
            raise OSError("lost")
        return (3, EOS)

    talks = [opening(n, environment) for n, environment in enumerate(environments)]
    with ThreadPoolExecutor(max(workers, 1)) as executor, pytest.raises(OSError, match="lost"):
        converse(talks, told(script), executor=executor if workers else None, limit=4)
    assert [environment.closed for environment in environments] == [1] * 6


def test_an_environment_at_work_when_the_engine_fails_is_closed_when_it_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "LINGER", 0.05)
    failed, events = threading.Event(), list[str]()

    class Slow(Echo):
        @override
        def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            assert failed.wait(20)
            events.append("step")
            return super().step(token_ids, finish)

        @override
        def close(self) -> None:
            events.append("close")

    def script(request: Request) -> tuple[int, ...]:
        if request.turn:
            raise OSError("lost")
        return (3, EOS)

    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(OSError, match="lost"):
            converse([opening(0, Slow()), opening(1)], told(script), executor=executor)
        assert events == []
        failed.set()
    assert events == ["step", "close"]


def test_an_interrupt_of_the_engine_ends_all_samples_and_leaves_no_environment_open() -> None:
    environments = [Echo(4) for _ in range(6)]

    def script(request: Request) -> tuple[int, ...]:
        if request.turn == 2:
            raise KeyboardInterrupt
        return (3, EOS)

    with pytest.raises(KeyboardInterrupt):
        converse([opening(n, environment) for n, environment in enumerate(environments)], told(script))
    assert [environment.closed for environment in environments] == [1] * 6
    assert all(each.metrics["turns"] == 2 for each in converse([opening(1)], told(lambda _: (3, EOS)))), "as before"


def test_conversations_run_below_an_event_loop_such_as_that_of_a_notebook() -> None:
    async def cell() -> list[Trajectory]:
        return converse([opening(n, Echo(2)) for n in range(3)], told(lambda _: (3, EOS)))

    assert [each.metrics["turns"] for each in asyncio.run(cell())] == [2, 2, 2]


def test_environments_may_run_an_event_loop() -> None:
    class Asynchronous(Echo):
        @override
        def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            return asyncio.run(self.later(token_ids, finish))

        async def later(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            await asyncio.sleep(0)
            return super().step(token_ids, finish)

    talks = [opening(n, Asynchronous(2)) for n in range(3)]
    assert [each.metrics["turns"] for each in converse(talks, told(lambda _: (3, EOS)))] == [2, 2, 2]


def test_nobody_to_talk_to_is_no_call_and_no_place_is_an_error() -> None:
    engine = told(lambda _: (3, EOS))
    assert converse([], engine) == [] and engine.requests == []
    with pytest.raises(ValueError, match="expected limit to be a whole number above 0 or None, got 0"):
        converse(openings(1), engine, limit=0)


def answered(engine: FakeEngine, talks: list[Conversation]) -> list[Trajectory]:
    return converse(talks, engine, logprobs=True, answers=Answers(engine, logprobs=True, vocabulary=12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": (3, 12)}, r"ids in \[0, 12\), .* got 12 for sample 7 \(turn 1, prompt"),
        ({"logprobs": torch.tensor([-1.0, 0.5])}, "at most 0 from FakeEngine, got 0.5 for"),
        ({"version": 3}, "weights that were pushed, the last of which is 0 .*, got version 3"),
        ({"sample_id": 4}, "the completion of sample 7 .* got that of sample 4"),
    ],
)
def test_what_an_engine_says_in_a_later_turn_is_held_against_what_it_was_asked(
    change: dict[str, Any], message: str
) -> None:
    good = Completion(token_ids=(3, EOS), logprobs=torch.tensor([-1.0, -1.0]), finish=FinishReason.STOP, version=0)

    def script(request: Request) -> Completion:
        return replace(good, **change) if (request.sample_id, request.turn) == (7, 1) else good

    with pytest.raises(EngineError, match=message):
        answered(told(script), openings())


class Leaving(Echo):
    """Raises in the second turn of its first try."""

    tries = 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        type(self).tries += 1
        return super().reset(row, seed)

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        if self.turn == 1 and self.tries == 1:
            raise OSError("gone")
        return super().step(token_ids, finish)


def test_pairs_are_the_requests_and_completions_of_the_engine_in_the_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, engine = Conversation.receive, told(lambda request: (3 + request.turn, EOS))
    swapped = lambda self, given: receive(self, replace(given, token_ids=given.token_ids[::-1]))  # noqa: E731
    monkeypatch.setattr(Conversation, "receive", swapped)
    first = opening(3)._wanted  # noqa: SLF001
    conversation = Conversation(None, first, ConversationLimits(turn_tokens=5), again=Leaving)
    (trajectory,) = converse([conversation], engine)
    assert [request.turn for request in engine.requests] == [0, 1, 0, 1, 2]
    assert all(pair[0] is request for pair, request in zip(conversation.pairs, engine.requests[2:], strict=True))
    assert [completion.token_ids for _, completion in conversation.pairs] == [(3, EOS), (4, EOS), (5, EOS)]
    assert trajectory.segments[0].token_ids == (EOS, 3), "as received"


def nan_for(*samples: int) -> FakeEngine:
    """An engine whose second turn of some samples has a log-probability that is none."""

    def script(request: Request) -> Completion:
        bad = request.sample_id in samples and request.turn == 1
        logprobs = torch.tensor([-1.0, float("nan") if bad else -1.0])
        return Completion(token_ids=(3, EOS), logprobs=logprobs, finish=FinishReason.STOP, version=0)

    return told(script)


@pytest.mark.parametrize("order", [1, -1])
def test_a_turn_that_cannot_be_believed_aborts_its_sample_and_no_other(order: int) -> None:
    with pytest.warns(UserWarning, match=r"1 of \d\d samples from FakeEngine are aborted .* sample 7 \(turn 1, prompt"):
        trajectories = answered(nan_for(7), openings()[::order])[::order]
    assert [each.finish for each in trajectories] == [
        FinishReason.ABORT if n == 7 else FinishReason.STOP for n in range(12)
    ]
    answers = [segment for segment in trajectories[7].segments if segment.sampled]
    assert [len(segment.token_ids) for segment in answers] == [2, 2]
    scores = answers[1].logprobs
    assert scores is not None and scores.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("order", [1, -1])
def test_many_turns_that_cannot_be_believed_are_the_engine_whatever_the_order(order: int) -> None:
    message = r"got a log-probability of nan at position 1 for sample 2 \(turn 1, .* and 6 of 21 samples are faulty"
    with pytest.raises(EngineError, match=message):
        answered(nan_for(2, 3, 6, 7, 10, 11), openings()[::order])


class Shared(FakeEngine):
    """One engine for the ranks of a test, each in a thread: all draw at once, or none."""

    capabilities = Capabilities(collective=True)
    across: Callable[[Any], list[Any]]

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.rounds: list[int] = []

    @override
    def _across(self, value: Any) -> list[Any]:
        return self.across(value)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.across("draw")
        self.rounds.append(len(requests))
        return super().generate_batch(requests, logprobs=logprobs)


def on_ranks(*ranks: Callable[[Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Return the result or exception of each rank; each gets a function that gathers a value of all."""
    barrier, values = threading.Barrier(len(ranks), timeout=20), dict[int, Any]()

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            every = [values[other] for other in range(len(ranks))]
            barrier.wait()
            assert len({type(one) for one in every if one is not None}) <= 1, f"ranks at different places: {every}"
            return every

        return gather

    def outcome(rank: int) -> Any:
        try:
            return ranks[rank](gather_of(rank))
        except Exception as error:  # noqa: BLE001  to be looked at
            return error

    with ThreadPoolExecutor(len(ranks)) as executor:
        return list(executor.map(outcome, range(len(ranks))))


def shared_rank(talks: list[Conversation], script: Any = lambda _: (3, EOS)) -> Callable[[Any], tuple[list[int], int]]:
    def rank(across: Callable[[Any], list[Any]]) -> tuple[list[int], int]:
        engine = Shared(script)
        engine.across = across
        engine.load_weights([], 0)
        engine.version, engine.pushed = 0, {0}
        return engine.rounds, len(converse(talks, engine, answers=Answers(engine, logprobs=False)))

    return rank


def test_ranks_that_share_an_engine_keep_to_rounds_until_nobody_has_a_conversation() -> None:
    found = on_ranks(
        shared_rank([opening(n, Echo(n)) for n in (1, 2, 4)]),
        shared_rank([]),
        shared_rank([opening(n, Echo(2)) for n in (2, 3)]),
    )
    assert found == [([3, 2, 1, 1], 3), ([0, 0, 0, 0], 0), ([2, 2, 0, 0], 2)]


def test_a_rank_that_fails_between_two_rounds_ends_those_of_the_others() -> None:
    twelve = Completion(token_ids=(3, EOS), logprobs=None, finish=FinishReason.STOP, version=7)
    good = replace(twelve, version=0)
    found = on_ranks(
        shared_rank([opening(0, Echo(4))]),
        shared_rank([opening(1, Echo(4))], lambda request: twelve if request.turn == 2 else good),
    )
    assert [type(each) for each in found] == [EngineError, EngineError]
    assert "conversations, but they failed on rank 1 of 2" in str(found[0]) and "got version 7" in str(found[1])
