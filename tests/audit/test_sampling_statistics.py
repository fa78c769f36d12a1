"""Statistical checks of samples report what chance cannot explain, and only that."""

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from kit.conversations import Echo, talking_module
from kit.evidence import culprits, evidence_of
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import Evaluation, FinishReason, PromptDataModule, SamplingParams, TransformersEngine
from lightning_rl.audit import CHECKS, SignalAudit
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.prompt_watch import HeldOut, Repeats
from lightning_rl.audit.sampling_statistics import (
    SHARES,
    Draw,
    Earlier,
    Pair,
    _noise_ratios,
    affordable_draws,
    earlier_of,
    odds_of,
    quantiles_of,
    repeat_ratios,
    repeats_of,
)
from lightning_rl.audit.token_bets import WAGERS, kinds_of
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion, Request

STUCK = "data module Stuck, or stage generate, the cursor of the prompts"
SAMPLING = SamplingParams(eos_token_ids=())


def pair(sample: int, tokens: Sequence[int], nats: float, *, prompt: int = 2, seed: int | None = None) -> Pair:
    """Return a request and a completion with equally likely tokens of the given total in nats."""
    seed = 1000 + sample if seed is None else seed
    request = Request(prefix_ids=(prompt,), sample_id=sample, seed=seed, sampling=SAMPLING)
    logprobs = torch.full((len(tokens),), -nats / len(tokens))
    return request, Completion(token_ids=tuple(tokens), logprobs=logprobs, finish=FinishReason.STOP, version=0)


def with_batch(*pairs: Pair, **fields: Any) -> Evidence:
    return replace(evidence_of(), batches=[list(pairs)], **fields)


@pytest.mark.parametrize(
    ("tokens", "prompt", "number"), [(12, 1, 32), (48, 1, 8), (1, 1, 48), (12, 400, 5), (12, 4000, 4)]
)
def test_draws_are_scored_up_to_a_budget_and_never_fewer_than_four(tokens: int, prompt: int, number: int) -> None:
    rows = [pair(row, [5] * tokens, 1.0) for row in range(100)]
    long = [(replace(request, prefix_ids=(2,) * prompt), completion) for request, completion in rows]
    assert affordable_draws(long) == number
    assert affordable_draws(long, 3) == max(-(-number // 3), 4) or tokens == 1


@pytest.mark.parametrize(
    ("nats", "copies", "others", "found"),
    [(40.0, 2, 6, True), (0.5, 6, 0, False), (3.0, 2, 60, False), (10.0, 5, 11, True), (20.0, 2, 2, False)],
)
def test_a_repeated_sample_counts_by_its_probability(nats: float, copies: int, others: int, found: bool) -> None:
    rows = [pair(row, [5] * 4, nats) for row in range(copies)]
    rows += [pair(copies + row, [6 + row, 6], nats) for row in range(others)]
    assert bool(culprits("repeated_samples", with_batch(*rows))) is found


def test_a_rollout_of_an_earlier_one_s_answers_is_found_whatever_the_prompts() -> None:
    earlier = Earlier(0, [0, 1], [(5, 6, 7), (5, 8, 9)])
    new = [pair(10 + row, tokens, 18.0, prompt=9) for row, tokens in enumerate([(5, 6, 7), (5, 8, 9)])]
    (finding,) = CHECKS["repeated_samples"](with_batch(*new, earlier=[earlier]))
    assert finding.culprit.startswith("engine") and "2 of 2 that repeat one of an earlier rollout" in finding.observed
    short = [pair(10 + row, (5,), 0.1) for row in range(8)]  # a common answer
    earlier = earlier._replace(responses=[(5,)] * 4)
    assert culprits("repeated_samples", with_batch(*short, earlier=[earlier])) == []


Choice = Callable[[Tensor, Tensor, list[int]], int]


def by_inversion(scores: Tensor, place: Tensor) -> int:
    return int((scores.softmax(-1).cumsum(-1) < place).sum().clamp(max=len(scores) - 1))


def scaled(factor: float, shift: float = 0.0) -> Choice:
    return lambda scores, place, _: by_inversion(scores, shift + factor * place)


def greedy_at(step: int) -> Choice:
    return lambda scores, place, seen: int(scores.argmax()) if len(seen) == step else by_inversion(scores, place)


def penalized(nats: float) -> Choice:
    def choose(scores: Tensor, place: Tensor, seen: list[int]) -> int:
        return by_inversion(scores - nats * torch.isin(torch.arange(len(scores)), torch.tensor(seen)), place)

    return choose


def among_the_likeliest(number: int) -> Choice:
    def choose(scores: Tensor, place: Tensor, _: list[int]) -> int:
        return by_inversion(scores.masked_fill(scores < scores.topk(number).values[-1], -torch.inf), place)

    return choose


def without(token: int) -> Choice:
    return lambda scores, place, _: by_inversion(scores.index_fill(0, torch.tensor(token), -torch.inf), place)


def draws_of(choose: Choice, number: int, seed: int, *, length: int = 6) -> list[Draw]:
    """Return draws of an engine that chooses a token from its scores, a uniform number and the tokens before."""
    generator = torch.Generator().manual_seed(seed)
    draws = list[Draw]()
    for sample in range(number):
        scores = 1.5 * torch.randn(length, 16, generator=generator, dtype=torch.float64)
        places, tokens = torch.rand(length, generator=generator, dtype=torch.float64), list[int]()
        for each, place in zip(scores, places, strict=True):
            tokens.append(choose(each, place, tokens))
        chances = scores.softmax(-1)
        draws.append(
            Draw(sample, quantiles=quantiles_of(tokens, chances), kinds=kinds_of([()], [tokens], chances, [3]))
        )
    return draws


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (scaled(0.8), "the first 0.75 of the probability, in the order of the vocabulary"),
        (scaled(0.6, 0.4), "the last 0.75 of the probability, in the order of the vocabulary"),
        (greedy_at(0), "from the likeliest on, at token 1"),
        (greedy_at(1), "from the likeliest on, at token 2"),
        (among_the_likeliest(5), "from the likeliest on, at all tokens"),
        (lambda scores, place, _: by_inversion(scores / 0.7, place), "from the likeliest on"),
        (lambda scores, place, _: by_inversion(scores / 2.0, place), "from the likeliest on"),
        (penalized(1.0), "that repeat the prompt or response too seldom"),
        (penalized(-1.0), "response too often"),
        (without(3), "that end the response too seldom"),
    ],
    ids=["narrow", "high", "greedy first", "greedy second", "top_k", "cold", "hot", "penalty", "bonus", "no end"],
)
def test_tokens_that_are_not_drawn_from_the_policy_are_found(choose: Choice, words: str) -> None:
    evidence = replace(evidence_of(), draws=draws_of(choose, 200, seed=0))
    (finding,) = CHECKS["sample_likelihood"](evidence)
    assert words in finding.observed


def test_sound_rollouts_give_no_alarm_and_odds_have_a_mean_of_one() -> None:
    earlier, empty = list[Earlier](), evidence_of()
    for number in range(60):
        draws = draws_of(scaled(1.0), 5, seed=number, length=4)
        evidence = replace(empty, draws=draws, earlier=earlier)
        assert not CHECKS["sample_likelihood"](evidence)
        earlier = [earlier_of(number, [], draws, odds=evidence.odds)]
    chances, total = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64), torch.zeros(len(WAGERS))
    for tokens in itertools.product(range(3), repeat=2):
        kinds = kinds_of([(1,)], [tokens], chances, [0])
        odds = odds_of([Draw(0, quantiles=quantiles_of(tokens, chances), kinds=kinds)], 0.0)
        total = total + chances[0, tokens[0]] * chances[1, tokens[1]] * odds.exp()
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize(
    ("held_out", "found"),
    [
        (None, False),
        (HeldOut(10, 0, 0, []), False),
        (HeldOut(10, 1, 3, [4]), False),  # short prompts may be equal by chance
        (HeldOut(10, 1, 40, [4]), True),
        (HeldOut(10, 10, 3, [4]), True),
        (HeldOut(10, 0, 0, [], shared=10), True),  # all of an evaluation, before any has trained
        (HeldOut(10, 0, 0, [], shared=3, chance=1e-3), False),
        (HeldOut(10, 0, 0, [], shared=5, chance=1e-7), True),
    ],
)
def test_validation_rows_that_train_are_found(held_out: HeldOut | None, found: bool) -> None:
    assert bool(culprits("held_out_prompts", replace(evidence_of(), held_out=held_out))) is found


@pytest.mark.parametrize(
    ("repeats", "found"),
    [
        (Repeats(0, 0, 0, own_order=True, nats=0.0, order_nats=0.0, samples=[]), []),
        (
            Repeats(0, 4, 0, own_order=True, nats=0.0, order_nats=0.0, samples=[4]),
            ["stage generate, the cursor of the prompts"],
        ),
        (
            Repeats(0, 0, 1, own_order=True, nats=0.0, order_nats=0.0, samples=[4]),
            ["stage generate, the cursor of the prompts"],
        ),
        (
            Repeats(0, 0, 3, own_order=False, nats=5.0, order_nats=0.0, samples=[4]),
            [],
        ),  # a custom order with random draws
        (
            Repeats(0, 0, 3, own_order=False, nats=30.0, order_nats=0.0, samples=[4]),
            ["stage generate, the cursor of the prompts"],
        ),
        (
            Repeats(2, 0, 0, own_order=True, nats=0.0, order_nats=0.0, samples=[4]),
            ["stage generate, the prompts of each rank"],
        ),
    ],
)
def test_rows_that_return_too_early_are_found(repeats: Repeats, found: list[str]) -> None:
    assert culprits("prompt_cursor", replace(evidence_of(), repeats=repeats)) == found


class FixedOpening(Echo):
    """Begins every conversation with the same words."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        super().reset(row, seed)
        return [3, 4]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("environment", "kind", "found"),
    [
        (FixedOpening, PromptDataModule, []),
        (Echo, PromptDataModule, []),
        (
            FixedOpening,
            lambda *given, **options: Stuck(*given, **options),
            ["data module Stuck, or stage generate, the cursor of the prompts"],
        ),
    ],
    ids=["fixed opening", "own prompt", "stuck"],
)
def test_rows_of_conversations_are_told_by_what_they_hold(environment: Any, kind: Any, found: list[str]) -> None:
    audit = SignalAudit(1, checks=["prompt_cursor"])
    rows = [{"prompt": [5, 6], "place": place} for place in range(16)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = talking_module(environment=environment)
        fit(module, callbacks=[audit], data=kind(rows, 4), max_epochs=-1, max_steps=5, limit_val_batches=0)
    assert sorted({finding.culprit for finding in audit.findings}) == found


@pytest.mark.parametrize(("place", "found"), [(3, ["the data, prompts of the validation set"]), (99, [])])
def test_held_out_rows_of_conversations_are_told_by_what_they_hold(place: int, found: list[str]) -> None:
    """All conversations begin alike and all prompts are equal; rows differ in a column that the environment reads."""
    audit = SignalAudit(1, checks=["held_out_prompts"])
    rows = [{"prompt": [5, 6], "place": number} for number in range(16)]
    data = PromptDataModule(rows, 4, validation=[{"prompt": [5, 6], "place": place}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(talking_module(environment=FixedOpening), callbacks=[audit], data=data, limit_val_batches=0)
    assert sorted({finding.culprit for finding in audit.findings}) == found


class Stuck(PromptDataModule):
    """Returns the first prompts at every place."""

    @override
    def at(self, places: Iterable[int]) -> list[Prompt]:
        places = list(places)
        return [replace(p, index=i) for p, i in zip(super().at([i % 4 for i in places]), places, strict=True)]


class ByLot(PromptDataModule):
    """Draws with replacement."""

    @override
    def at(self, places: Iterable[int]) -> list[Prompt]:
        drawn = [(i, random.Random(i).randrange(36)) for i in places]
        return [replace(super(ByLot, self).at([row])[0], index=i) for i, row in drawn]


def said_of_data(data: PromptDataModule, evaluation: Sequence[Evaluation] = (), rollouts: int = 5) -> list[str]:
    audit = SignalAudit(1, checks=["prompt_source", "prompt_cursor", "held_out_prompts"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = tiny_module(evaluation=evaluation)
        fit(module, callbacks=[audit], data=data, max_epochs=-1, max_steps=rollouts, limit_val_batches=0)
    return sorted({f"{finding.check}: {finding.culprit}" for finding in audit.findings})


PAIRS = [[2 + row // 6, 8 + row % 6] for row in range(36)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: PromptDataModule(PAIRS, 4), []),
        (lambda: PromptDataModule(PAIRS[:4], 4), []),  # an epoch of one rollout
        (lambda: PromptDataModule([*PAIRS[:3], *PAIRS[:3]], 4), []),  # every row twice
        (lambda: PromptDataModule(IterableDataset.from_generator(rows_of(PAIRS)), 4, epoch_length=9), []),
        (lambda: ByLot(PAIRS, 4), []),
        (lambda: Stuck(PAIRS, 4), [f"prompt_cursor: {STUCK}"]),
    ],
    ids=["shuffled", "small", "twice", "stream", "by lot", "stuck"],
)
def test_a_source_that_stopped_is_told_from_small_ones(data: Callable[[], PromptDataModule], said: list[str]) -> None:
    assert said_of_data(data()) == said


def rows_of(prompts: Sequence[Any]) -> Callable[[], Iterator[dict[str, Any]]]:
    return lambda: ({"prompt": prompt} for prompt in prompts)


@pytest.mark.parametrize(
    ("name", "held_out", "said"),
    [
        ("other", [[2, 3], [3, 4], [4, 2], [3, 3]], []),
        ("train", PAIRS, []),  # the training set is the validation set on purpose
        ("leaked", PAIRS[3:9], ["held_out_prompts: the data, prompts of evaluation leaked"]),
        ("met", [PAIRS[3], [2, 2], [3, 3]], []),
    ],
)
def test_an_evaluation_that_trains_is_found(name: str, held_out: list[list[int]], said: list[str]) -> None:
    assert said_of_data(PromptDataModule(PAIRS, 4), [Evaluation(name, held_out)], rollouts=1) == said


def test_a_likelihood_ratio_of_repeats_has_a_mean_of_at_most_one() -> None:
    """Every response of three tokens of two kinds, each beside three earlier ones."""
    chances, others = (0.7, 0.3), [(0, 0, 1), (0, 1), (1, 1, 1)]
    earlier = [Earlier(0, [0, 1, 2], others)]
    total, means = 0.0, torch.zeros(len(SHARES), dtype=torch.float64)
    for tokens in itertools.product(range(2), repeat=3):
        request, completion = pair(9, tokens, 1.0)
        logprobs = torch.tensor([chances[token] for token in tokens]).log()
        repeats = repeats_of([[(request, replace(completion, logprobs=logprobs))]], earlier)
        chance = math.prod(chances[token] for token in tokens)
        total, means = total + chance, means + chance * torch.tensor(repeat_ratios(repeats)[1]).exp()
    assert total == pytest.approx(1.0) and bool((means <= 1.0).all()) and bool((means > 0.5).all())


def test_repeats_that_are_likely_in_each_rollout_are_found_over_several() -> None:
    rows = [pair(row, [5, 6], 6.0, seed=row) for row in range(3)]
    one = repeat_ratios(repeats_of([rows], []))
    earlier = [Earlier(number, [], [], repeated=one) for number in range(3)]
    assert culprits("repeated_samples", with_batch(*rows)) == []
    assert culprits("repeated_samples", with_batch(*rows, earlier=earlier)) == ["engine none"]


def test_seeds_that_repeat_those_of_an_earlier_rollout_are_found() -> None:
    earlier = [Earlier(0, [], [], seeds=list(range(1010, 1014)))]
    rows = [pair(10 + row, [5 + row], 1.0) for row in range(4)]
    assert culprits("repeated_samples", with_batch(*rows, earlier=earlier)) == [
        "stage generate, the seeds of the requests"
    ]


@pytest.mark.parametrize("kind", ["gumbel", "quantile", "ranked"])
@pytest.mark.parametrize(("repeats", "found"), [(True, True), (False, False)])
def test_tokens_drawn_with_the_noise_of_an_earlier_rollout_are_found(kind: str, repeats: bool, found: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def rollout(noise: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.randn(12, 8, 32, generator=generator, dtype=torch.float64).log_softmax(-1)
        if kind == "gumbel":
            return (scores - (-noise.log()).log()).argmax(-1), scores
        order = scores.argsort(-1, descending=True) if kind == "ranked" else torch.arange(32).expand_as(scores)
        place = (scores.gather(-1, order).exp().cumsum(-1) < noise[..., :1]).sum(-1).clamp(max=31)
        return order.gather(-1, place[..., None])[..., 0], scores

    earlier, findings = list[Earlier](), list[Any]()
    silent = Draw(0)
    first = torch.rand(12, 8, 32, generator=generator, dtype=torch.float64)
    for number in range(4):
        tokens, scores = rollout(
            first if repeats else torch.rand(first.shape, generator=generator, dtype=torch.float64)
        )
        batch = [pair(100 * number + row, each.tolist(), 20.0, prompt=number) for row, each in enumerate(tokens)]
        before = {draw.sample: draw for one in earlier[-1:] for draw in one.draws}
        draws = list[Draw]()
        for row, ((_, one), each) in enumerate(zip(batch, scores, strict=True)):
            quantiles = quantiles_of(one.token_ids, each.exp())
            draw = silent._replace(sample=row, tokens=one.token_ids, quantiles=quantiles)
            if row in before:
                (same_noise,) = _noise_ratios([one.token_ids], each, quantiles, [before[row]], 0.0)
                draw = draw._replace(same_noise=same_noise)
            draws.append(draw)
        evidence = replace(evidence_of(), batches=[batch], draws=draws, earlier=earlier)
        findings = CHECKS["repeated_samples"](evidence)
        earlier = [*earlier, earlier_of(number, [batch], draws)]
    assert bool(findings) is found and all("same places" in finding.observed for finding in findings)


class SameNoise(TransformersEngine):
    """An engine that draws every batch with the same noise."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        seeded = [replace(request, seed=place) for place, request in enumerate(requests)]
        return super().generate_batch(seeded, logprobs=logprobs)


@pytest.mark.parametrize(("engine", "found"), [(SameNoise, True), (TransformersEngine, False)])
def test_an_engine_with_equal_noise_in_every_rollout_is_found(engine: Any, found: bool) -> None:
    audit = SignalAudit(1, checks=["repeated_samples"])
    module = tiny_module(engine=engine(), policy=tiny_policy, optimizer=partial(SGD, lr=1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit(module, callbacks=[audit], data=tiny_prompts(32, 4), max_steps=8)
    assert {finding.culprit for finding in audit.findings} == ({"engine SameNoise"} if found else set())
