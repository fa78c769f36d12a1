"""Checks of rewards: each row has what the functions said of its own completion, whoever stood beside it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import isclose, isnan

import torch

from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.finding import Finding
from lightning_rl.rewards import RewardCall
from lightning_rl.rewards.call import completion_form
from lightning_rl.rewards.scoring import call_alone

MAX_ROWS, MAX_SECONDS = 8, 0.1


@check(cure="call with all rows, in their order, and join by sample id")
def reward_rows(evidence: Evidence) -> Iterator[Finding]:
    """The reward of every row is the weighted sum of what the functions said of its own completion: none is joined by
    position or handed to a neighbour.
    """
    mixed_up = [(call, samples) for call in evidence.calls if (samples := _samples_of_others(evidence, call))]
    for call, samples in mixed_up:
        yield Finding(
            culprit=f"stage draw, the call of reward {call.name}",
            expected="completions that the engine drew",
            observed=f"something else in {len(samples)} rows",
            samples=samples[:4],
        )
    rollout, sums = evidence.rollout, _weighted_sums(evidence)
    rows = zip(*(part.tolist() for part in (rollout.sample_ids, rollout.rewards, rollout.rewarded)), strict=True)
    wrong = [
        sample
        for sample, reward, rewarded in rows
        if rewarded and sample in sums and not isclose(reward, sums[sample], rel_tol=1e-3, abs_tol=1e-5)
    ]
    if wrong and not mixed_up:
        yield Finding(
            culprit="stage draw, the rewards of its rows",
            expected="the weighted sum of what the functions said",
            observed=f"something else in {len(wrong)} rows",
            samples=wrong[:4],
        )


def _weighted_sums(evidence: Evidence) -> dict[int, float]:
    """The weighted sum of all functions for each sample of which every call is known; NaN where one failed."""
    weights, functions = evidence.facts.reward_weights, len({call.name for call in evidence.calls})
    totals, counts = defaultdict[int, float](float), Counter[int]()
    for call in evidence.calls:
        for sample, value in zip(_samples_of(evidence, call), call.values, strict=False):
            counts[sample] += 1
            totals[sample] += 0.0 if value is None else value * weights.get(call.name, 0.0)
    return {sample: total for sample, total in totals.items() if counts[sample] == functions and not isnan(total)}


def _batches(evidence: Evidence, size: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """What the engine drew at once, in parts of the size of a call: samples with their token ids."""
    for batch in evidence.batches:
        sampled = [(request.sample_id, tuple(completion.token_ids)) for request, completion in batch]
        if len(sampled) >= size:
            yield sampled[:size]
            yield sampled[len(sampled) - size :]


def _samples_of(evidence: Evidence, call: RewardCall) -> list[int]:
    """The samples that a call was about, in its order; empty if it was about something else."""
    asked = [tuple(ids) for ids in call.completion_ids]
    for batch in _batches(evidence, len(asked)):
        if [ids for _, ids in batch] == asked:
            return [sample for sample, _ in batch]
    return []


def _samples_of_others(evidence: Evidence, call: RewardCall) -> list[int]:
    """Samples whose function was given another row's completion."""
    asked, text = [tuple(ids) for ids in call.completion_ids], evidence.text
    samples = _samples_of(evidence, call)
    if samples and text is not None:
        rows = zip(samples[:MAX_ROWS], asked, call.prompts, call.completions, strict=False)
        return [sample for sample, ids, prompt, completion in rows if completion_form(prompt, text(ids)) != completion]
    for batch in [] if samples else _batches(evidence, len(asked)):
        if Counter(ids for _, ids in batch) == Counter(asked):
            return [sample for (sample, ids), other in zip(batch, asked, strict=True) if ids != other]
    return []


@check(expected="the same value for a completion, whoever stands beside it", cure="score each row by itself")
def reward_order(evidence: Evidence) -> Iterator[Finding]:
    """The reward of a completion depends on neither the order of the rows nor on its neighbours, where the function is
    deterministic and quick enough to be asked again.
    """
    for call in evidence.calls:
        number = len(call.completions)
        if number < 2 or call.seconds > MAX_SECONDS or call.function is None or call.failures:
            continue
        wrong = rows_valued_otherwise(call, range(min(number, MAX_ROWS))[::-1])
        if wrong and not rows_valued_otherwise(call, range(number)):  # else it differs by itself
            yield Finding(
                culprit=f"reward {call.name}",
                observed=f"other values for rows {wrong[:4]} of a call with fewer rows, in reverse order",
                samples=_samples_of(evidence, call)[: len(wrong)],
            )
            return


def rows_valued_otherwise(call: RewardCall, rows: Sequence[int]) -> list[int]:
    """The rows whose values are others when the function is asked for ``rows`` alone, in that order."""
    if call.function is None:
        return []
    values = call_alone(call.name, call.function, call.rows.select(rows)).values
    return [row for row, value in zip(rows, values, strict=True) if not _same_value(value, call.values[row])]


def _same_value(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return bool(torch.isclose(torch.tensor(float(value)), torch.tensor(float(other)), equal_nan=True))
