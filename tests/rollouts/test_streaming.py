"""Arrivals: rewards of single rows begin with their answers, and a rollout is the one that it would be otherwise."""

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import request_of
from typing_extensions import override

from lightning_rl import EngineError, FakeEngine, FinishReason, PromptDataModule, SamplingParams
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.engine import Exchange
from lightning_rl.rewards import Rewards, SubprocessReward
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.rollouts.streaming import Arrivals

SECONDS = 60.0
COMPLETION = Completion(token_ids=(5, 1), logprobs=torch.zeros(2), finish=FinishReason.STOP, version=0)


class OneByOne(FakeEngine):
    """Answers the last request first; after the first answer it waits until that was scored, if there is a pipe."""

    def __init__(self, pipe: Path | None = None) -> None:
        super().__init__(lambda request: [2 + request.sample_id % 5] * (1 + request.sample_id % 3) + [1])
        self.pipe, self.was_scored = pipe, False

    @override
    def _converse(self, exchange: Exchange, *, logprobs: bool) -> None:
        while requests := exchange.take():
            for request in reversed(requests):
                exchange.give(request, self.generate([request], logprobs=logprobs)[0])
                self._await_score()

    def _await_score(self) -> None:
        if self.pipe is None or self.was_scored:
            return
        reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self.was_scored = bool(select.select([reader], [], [], SECONDS)[0])
        finally:
            os.close(reader)


def prompts() -> Sequence[Prompt]:
    data = PromptDataModule([{"prompt": [2, 3], "answer": 4}, {"prompt": [5], "bonus": 0.5}], 1, shuffle=False)
    data.connect(None, None)
    return data.take(2)


def sampler_of(engine: FakeEngine, rewards: Any, **options: Any) -> Sampler:
    sampling = SamplingParams(max_new_tokens=9, eos_token_ids=[1])
    engine.load_weights([], 0)
    return Sampler(
        engine=engine, tokenizer=None, rewards=Rewards(rewards), group_size=3, seed=7, sampling=sampling, **options
    )


@pytest.fixture
def isolated() -> Iterator[Any]:
    made: list[SubprocessReward] = []

    def make(reward: Any, **options: Any) -> SubprocessReward:
        made.append(SubprocessReward(reward, per_sample=True, seconds=SECONDS, sample_seconds=SECONDS, **options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def by_row(completion_ids: Any, answer: Any, bonus: Any, log_extra: Any, **_: Any) -> list[float]:
    log_extra("length", [len(ids) for ids in completion_ids])
    return [len(ids) + (one or 0) + (more or 0) for ids, one, more in zip(completion_ids, answer, bonus, strict=True)]


@pytest.mark.slow
def test_a_row_is_scored_while_others_are_drawn(tmp_path: Path, isolated: Any) -> None:
    pipe = tmp_path / "scored"
    os.mkfifo(pipe)

    def tells(completion_ids: Any, **_: Any) -> list[float]:
        if completion_ids == [[2, 2, 2, 1]]:  # the first answer; opening the pipe waits for its reader
            pipe.write_text("scored")
        return [float(len(ids)) for ids in completion_ids]

    engine = OneByOne(pipe)
    sampler = sampler_of(engine, {"tells": isolated(tells)})
    samples = sampler.generate_together(sampler.requests(prompts(), 0))
    assert engine.was_scored
    assert sampler.score(samples)[0].rewards.tolist() == samples.rows.response_lengths.tolist()


@pytest.mark.slow
def test_a_rollout_does_not_depend_on_the_order_of_its_answers(isolated: Any) -> None:
    def together(completion_ids: Any, **_: Any) -> list[float]:
        return [float(len(completion_ids))] * len(completion_ids)

    results = []
    for reward in (by_row, isolated(by_row)):
        sampler = sampler_of(OneByOne(), {"row": reward, "batch": together}, greedy_baseline=True)
        rollout, calls, failed = sampler.score(sampler.generate_together(sampler.requests(prompts(), 0)))
        assert not failed.any(), [call.failures for call in calls]
        results.append((rollout.state(), [(call.values, call.extras, call.completion_ids) for call in calls]))
    (plain, calls), (early, others) = results
    assert calls == others
    assert plain.keys() == early.keys() and all(torch.equal(plain[name], early[name]) for name in plain)


def test_requests_are_taken_once_and_answers_come_back_in_their_order() -> None:
    requests, places = [request_of((2,), sample_id=number) for number in range(3)], list[int]()
    arrivals = Arrivals(requests, lambda place, _: places.append(place))
    assert arrivals.take() == requests and arrivals.take(wait=False) == []
    with pytest.raises(EngineError, match="expected 3 completions, got 0"):
        arrivals.completions()
    for place in (2, 0, 1):
        arrivals.give(requests[place], COMPLETION)
    assert places == [2, 0, 1] and arrivals.take() == [] and arrivals.completions() == [COMPLETION] * 3
    with pytest.raises(EngineError, match="got a second one for sample 2"):
        arrivals.give(requests[2], COMPLETION)


def test_a_failure_ends_the_wait_for_the_other_answers() -> None:
    arrivals = Arrivals([request_of((2,))], lambda *_: None)
    arrivals.take()
    arrivals.fail(ValueError("first"))
    arrivals.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        arrivals.take()


@pytest.mark.slow
def test_an_answer_that_cannot_be_one_is_refused_before_it_is_scored(isolated: Any) -> None:
    class Odd(OneByOne):
        @override
        def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
            return [
                Completion(token_ids=(99,), logprobs=torch.zeros(1), finish=drawn.finish, version=0)
                for drawn in super()._draw(requests, logprobs=logprobs)
            ]

    sampler = sampler_of(Odd(), {"row": isolated(by_row)}, vocabulary=16)
    with pytest.raises(EngineError, match=r"expected token ids in \[0, 16\)"):
        sampler.generate_together(sampler.requests(prompts(), 0))
