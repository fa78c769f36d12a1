"""Faulty samples: copies, other distributions, other prompts, other rows."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kit.support import tiny_prompts
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

import lightning_rl.data.data_module
import lightning_rl.evaluation.tally
import lightning_rl.rollouts.collector
from faults.fault import Fault, engine
from faults.parts import Altering
from lightning_rl import Evaluation, FinishReason, PromptDataModule, TransformersEngine
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion, Request, request_seed

SLOW = {"optimizer": partial(AdamW, lr=1e-3)}
"""A policy that keeps its entropy over many rollouts."""

MANY: dict[str, Any] = {"options": SLOW, "data": partial(tiny_prompts, 64, 4), "max_steps": 16}
"""Sixteen rollouts of sixteen samples."""

AGAIN: dict[str, Any] = {
    "options": SLOW,
    "data": partial(tiny_prompts, 4, 4),
    "max_steps": 8,
    "trainer": {"max_epochs": 8},
}
"""Eight rollouts of the same four prompts."""


class Drawing(TransformersEngine):
    """Samples from changed logits and reports the policy's log-probabilities, like a server with default filters.

    Args:
        choose: Function from log-probabilities at the temperature [V], the tokens so far and the request to logits.
    """

    def __init__(self, choose: Callable[[Tensor, list[int], Request], Tensor] = lambda scores, *_: scores) -> None:
        super().__init__()
        self.choose = choose

    @override
    @torch.no_grad()
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if any(request.sampling.temperature == 0 for request in requests):
            return super().generate_batch(requests, logprobs=logprobs)
        return [self._complete(request) for request in requests]

    def _complete(self, request: Request) -> Completion:
        model, draw = self._model_for("generate"), torch.Generator().manual_seed(request.seed)
        drawn: list[int] = []
        reported: list[float] = []
        finish = FinishReason.LENGTH
        while len(drawn) < request.sampling.max_new_tokens and finish == FinishReason.LENGTH:
            logits = model(input_ids=torch.tensor([[*request.prefix_ids, *drawn]]), use_cache=False).logits[0, -1]
            scores = (logits.float() / request.sampling.temperature).log_softmax(-1)
            token = int(self.choose(scores, drawn, request).softmax(-1).multinomial(1, generator=draw))
            drawn.append(token)
            reported.append(float(scores[token]))
            finish = FinishReason.STOP if token in request.eos_token_ids else FinishReason.LENGTH
        return Completion(token_ids=tuple(drawn), logprobs=torch.tensor(reported), finish=finish, version=self.version)


def top_two(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    return scores.masked_fill(scores < scores.topk(2).values[-1], -torch.inf)


def nucleus(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    ordered, order = scores.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return scores.index_fill(0, order[before > 0.7], -torch.inf)


def hotter(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    return scores / 2


def no_early_end(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    if len(drawn) >= 6:
        return scores
    return scores.index_fill(0, torch.tensor(request.eos_token_ids), -torch.inf)


def no_repetition(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    return scores.index_add(0, torch.tensor(drawn, dtype=torch.int64), torch.full((len(drawn),), -1.5))


def some_greedy(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    return scores * 1000 if request.sample_id % 4 == 0 else scores


def nearly_greedy(scores: Tensor, drawn: list[int], request: Request) -> Tensor:
    return scores * 6


class Repeating(TransformersEngine):
    """Returns one answer for all samples of a prompt."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        first: dict[tuple[int, ...], Completion] = {}
        drawn = super().generate_batch(requests, logprobs=logprobs)
        return [first.setdefault(request.prefix_ids, one) for request, one in zip(requests, drawn, strict=True)]


class Remembering(TransformersEngine):
    """Answers known prompts with an answer of an earlier rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[Any, ...], Completion] = {}

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn, given = super().generate_batch(requests, logprobs=logprobs), []
        for request, completion in zip(requests, drawn, strict=True):
            key = (request.prefix_ids, request.sample_id % 4)
            kept = self.known.setdefault(key, completion)
            given.append(dataclasses.replace(kept, version=self.version))
        return given


class Reordering(TransformersEngine):
    """Returns answers in another order than the requests.

    Args:
        order: Function from requests and answers to the places of the answers.
    """

    def __init__(self, order: Callable[[Sequence[Request], Sequence[Completion]], Sequence[int]]) -> None:
        super().__init__()
        self.order = order

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super().generate_batch(requests, logprobs=logprobs)
        return [drawn[place] for place in self.order(requests, drawn)] if len(drawn) > 1 else drawn


def next_prompt(requests: Sequence[Request], drawn: Sequence[Completion]) -> list[int]:
    return [(place + 4) % len(drawn) for place in range(len(drawn))]


def without_beginning(request: Request) -> Request:
    return dataclasses.replace(request, prefix_ids=request.prefix_ids[-1:])


def stopped_early(completion: Completion) -> Completion:
    if len(completion.token_ids) <= 4 or completion.logprobs is None:
        return completion
    short = {"token_ids": completion.token_ids[:4], "logprobs": completion.logprobs[:4]}
    return dataclasses.replace(completion, **short, finish=FinishReason.LENGTH)


def with_an_end(completion: Completion) -> Completion:
    if completion.finish != FinishReason.LENGTH or completion.logprobs is None:
        return completion
    ids, logprobs = (*completion.token_ids[:-1], 1), completion.logprobs.clone()
    logprobs[-1] = 0.0
    return dataclasses.replace(completion, token_ids=ids, logprobs=logprobs, finish=FinishReason.STOP)


class Silent(TransformersEngine):
    """Returns an empty answer with finish reason stop to every fifth request."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super().generate_batch(requests, logprobs=logprobs)
        nothing = {"token_ids": (), "logprobs": torch.zeros(0), "finish": FinishReason.STOP}
        return [
            dataclasses.replace(one, **nothing) if request.sample_id % 5 == 0 and one.logprobs is not None else one
            for request, one in zip(requests, drawn, strict=True)
        ]


def seed_of_prompt(run_seed: int, rollout: int, sample_id: int) -> int:
    return request_seed(run_seed, rollout, sample_id // 4)


def seed_of_place(run_seed: int, rollout: int, sample_id: int) -> int:
    return request_seed(run_seed, 0, sample_id % 4)


class CutPrompts(PromptDataModule):
    """Truncates prompts to a token for the engine only."""

    @override
    def at(self, places: Iterable[int]) -> list[Prompt]:
        return [dataclasses.replace(prompt, token_ids=prompt.token_ids[-1:]) for prompt in super().at(places)]


class StuckPrompts(PromptDataModule):
    """Does not advance its cursor."""

    @override
    def take(self, number: int) -> list[Prompt]:
        taken = super().take(number)
        self.position = dataclasses.replace(self.position, cursor=0)
        return taken


class EverySecondBatch(PromptDataModule):
    """Advances twice as far as it reads."""

    @override
    def take(self, number: int) -> list[Prompt]:
        taken = super().take(number)
        super().take(number)
        return taken


class OnePromptTwice(PromptDataModule):
    """Returns its first prompt again instead of the last."""

    @override
    def take(self, number: int) -> list[Prompt]:
        taken = super().take(number)
        return [*taken[:-1], taken[0]]


ORDER = lightning_rl.data.mixture.pass_order


def without_the_end(self: PromptDataModule, number: int, take: Any = PromptDataModule.take) -> list[Prompt]:
    """Return the next prompts; each pass leaves out its last four rows."""
    if self.position.cursor % len(ROWS) >= len(ROWS) - 4:
        take(self, number)
    return take(self, number)


class FirstPrompts(PromptDataModule):
    """Advances, but reads the first four rows again and again."""

    @override
    def at(self, places: Iterable[int]) -> list[Prompt]:
        places = list(places)
        rows = self.prompts.prompts([place % 4 for place in places], places)  # pyrefly: ignore[missing-attribute]
        return list(rows)


class MixedPrompts(PromptDataModule):
    """Trains on some validation prompts."""

    @override
    def at(self, places: Iterable[int]) -> list[Prompt]:
        held_out = self.validation_prompts()
        mixed = [held_out[p.index % len(held_out)] if p.index % 3 == 0 else p for p in super().at(places)]
        return [dataclasses.replace(prompt, index=place) for prompt, place in zip(mixed, places, strict=True)]


ROWS = [[2 + place % 13, 3 + place % 7, 4][: 1 + place % 3] for place in range(16)]
HELD_OUT = [[5, 5, place] for place in range(6, 10)]
SEEDS = "seed|generate|draw|sampl|engine"


def with_engine(make: Callable[[], Any]) -> dict[str, Any]:
    """Return options for many rollouts of an engine."""
    return {**MANY, "fresh": {"engine": make}}


FAULTS: tuple[Fault, ...] = (
    engine("one answer for all samples of a prompt", Repeating),
    Fault(
        "one seed for all samples of a prompt",
        SEEDS,
        patches=[patch.object(lightning_rl.rollouts.collector, "request_seed", seed_of_prompt)],
    ),
    Fault(
        "one seed for a place in its group",
        SEEDS,
        patches=[patch.object(lightning_rl.rollouts.collector, "request_seed", seed_of_place)],
        **AGAIN,
    ),
    engine("answers of earlier rollouts", Remembering, **AGAIN),
    Fault("a default top-k", "Drawing", **with_engine(lambda: Drawing(top_two))),
    Fault("a default top-p", "Drawing", **with_engine(lambda: Drawing(nucleus))),
    Fault("tokens drawn at twice the temperature", "Drawing", **with_engine(lambda: Drawing(hotter))),
    Fault("a least number of tokens left over", "Drawing", **with_engine(lambda: Drawing(no_early_end))),
    Fault("a penalty on repetition left over", "Drawing", **with_engine(lambda: Drawing(no_repetition))),
    Fault("every fourth sample greedy", "Drawing", **with_engine(lambda: Drawing(some_greedy))),
    Fault("every sample nearly greedy", "Drawing", **with_engine(lambda: Drawing(nearly_greedy))),
    engine("answers to the next prompt", lambda: Reordering(next_prompt)),
    engine("prompts cut by the engine", lambda: Altering(request=without_beginning)),
    engine("an engine that stops before the limit and calls it the limit", lambda: Altering(completion=stopped_early)),
    engine("an end that was not sampled", lambda: Altering(completion=with_an_end)),
    engine("empty answers that say they stopped", Silent),
    Fault("prompts cut by the data", "prompt|data|CutPrompts", data=lambda: CutPrompts(ROWS, 4)),
    Fault(
        "validation prompts among those that train",
        "validation",
        options=SLOW,
        data=lambda: tiny_prompts(16, 4, validation=ROWS[:4]),
    ),
    Fault(
        "a validation prompt in training now and then",
        "validation|MixedPrompts|data",
        data=lambda: MixedPrompts(ROWS, 4, validation=HELD_OUT),
    ),
    Fault(
        "an evaluation of prompts that train",
        "evaluation|validation|exam",
        options={**SLOW, "evaluation": Evaluation("exam", ROWS[:4], samples=1)},
    ),
    Fault(
        "a biased pass@k",
        "pass@2 of evaluation exam",
        options={**SLOW, "evaluation": Evaluation("exam", HELD_OUT, samples=4, pass_at=2)},
        patches=[patch.object(lightning_rl.evaluation.tally, "pass_at_k", lambda n, c, k: 1 - (1 - c / n) ** k)],
    ),
    Fault("a cursor that never moves", "cursor|prompt|data|StuckPrompts", data=lambda: StuckPrompts(ROWS, 4)),
    Fault("a cursor that moves too far", "EverySecondBatch", data=lambda: EverySecondBatch(ROWS, 4)),
    Fault("a prompt twice in a rollout", "take of the data module", data=lambda: OnePromptTwice(ROWS, 4)),
    Fault(
        "passes without the last rows",
        "cursor of the prompts",
        patches=[patch.object(PromptDataModule, "take", without_the_end)],
        data=lambda: PromptDataModule(ROWS, 4),
    ),
    Fault(
        "every pass in the same order",
        "cursor of the prompts",
        options=SLOW,
        patches=[patch.object(lightning_rl.data.mixture, "pass_order", lambda size, seed, _: ORDER(size, seed, 0))],
        data=lambda: PromptDataModule(ROWS, 4),
        max_steps=12,
        trainer={"max_epochs": 3},
    ),
    Fault("the first rows again and again", "cursor|prompt|data|FirstPrompts", data=lambda: FirstPrompts(ROWS, 4)),
)
