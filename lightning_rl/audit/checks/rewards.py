"""Checks of rewards: each row has what the functions said of its own completion, whoever stood beside it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isclose, isnan

import torch

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.audit.recorded import RewardCall

MOST_ROWS, MOST_SECONDS = 8, 0.1


@check("reward_rows")
def reward_rows(evidence: Evidence) -> list[Finding]:
    """The reward of every row is the weighted sum of what the functions said of its own completion: none is joined by
    position or handed to a neighbour.
    """
    found, said = [], _said(evidence)
    for call in evidence.calls:
        samples = _mixed_up(evidence, call)
        if samples:
            found.append((f"stage draw, the call of reward {call.name}", "completions that the engine drew", samples))
    rollout, wrong = evidence.rollout, list[int]()
    ids, rewarded, rewards = (part.tolist() for part in (rollout.sample_ids, rollout.rewarded, rollout.rewards))
    for sample, kept, reward in zip(ids, rewarded, rewards, strict=True):
        if kept and sample in said and not isclose(reward, said[sample], rel_tol=1e-3, abs_tol=1e-5):
            wrong.append(sample)
    if wrong and not found:
        found.append(("stage draw, the rewards of its rows", "the weighted sum of what the functions said", wrong))
    return [
        Finding(
            check="reward_rows", culprit=culprit, expected=expected, observed=f"something else in {len(samples)} rows",
            samples=samples[:4], cure="call with all rows, in their order, and join by sample id",
        )
        for culprit, expected, samples in found
    ]  # fmt: skip


def _said(evidence: Evidence) -> dict[int, float]:
    """The weighted sum of all functions for each sample of which every call is known; NaN where one failed."""
    weights = evidence.subject.reward_weights
    calls = [(call, samples) for call in evidence.calls if (samples := _samples_of(evidence, call))]
    totals, counts = dict[int, float](), Counter[int]()
    for call, samples in calls:
        for sample, value in zip(samples, call.values, strict=True):
            counts[sample] += 1
            totals[sample] = totals.get(sample, 0.0) + (0.0 if value is None else value * weights.get(call.name, 0.0))
    whole = len({call.name for call in evidence.calls})
    return {sample: total for sample, total in totals.items() if counts[sample] == whole and not isnan(total)}


def _batches(evidence: Evidence, size: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """What the engine drew at once, in parts of the size of a call: samples with their token ids."""
    for batch in evidence.batches:
        drawn = [(request.sample_id, tuple(completion.token_ids)) for request, completion in batch]
        if len(drawn) >= size:
            yield drawn[:size]
            yield drawn[len(drawn) - size :]


def _samples_of(evidence: Evidence, call: RewardCall) -> list[int]:
    """The samples that a call was about, in its order; empty if it was about something else."""
    given = [tuple(ids) for ids in call.completion_ids]
    for batch in _batches(evidence, len(given)):
        if [ids for _, ids in batch] == given:
            return [sample for sample, _ in batch]
    return []


def _mixed_up(evidence: Evidence, call: RewardCall) -> list[int]:
    """Samples whose function was given another row's completion."""
    given, text = [tuple(ids) for ids in call.completion_ids], evidence.subject.text
    samples = _samples_of(evidence, call)
    if samples and text is not None:
        shown = zip(samples[:MOST_ROWS], given, call.completions, strict=False)
        return [sample for sample, ids, completion in shown if text(ids) != completion]
    for batch in [] if samples else _batches(evidence, len(given)):
        if Counter(ids for _, ids in batch) == Counter(given):
            return [sample for (sample, own), other in zip(batch, given, strict=True) if own != other]
    return []


@check("reward_order")
def reward_order(evidence: Evidence) -> list[Finding]:
    """The reward of a completion depends on neither the order of the rows nor on its neighbours, where the function is
    deterministic and quick enough to be asked again.
    """
    found = []
    for call in evidence.calls:
        if len(call.completions) < 2 or call.seconds > MOST_SECONDS or call.function is None:
            continue
        rows = list(range(min(len(call.completions), MOST_ROWS)))[::-1]
        wrong = others_among(call, rows)
        if wrong and not others_among(call, range(len(call.completions))):  # else it differs by itself
            found.append((call, wrong))
    return [
        Finding(
            check="reward_order", culprit=f"reward {call.name}", samples=_samples_of(evidence, call)[: len(wrong)],
            expected="the same value for a completion, whoever stands beside it", cure="score each row by itself",
            observed=f"other values for rows {wrong[:4]} of a call with fewer rows, in reverse order",
        )
        for call, wrong in found[:1]
    ]  # fmt: skip


def others_among(call: RewardCall, rows: Sequence[int]) -> list[int]:
    """The rows whose values are others when the function is asked for ``rows`` alone, in that order."""
    again = _asked(call, rows)
    return [row for row, value in zip(rows, again, strict=True) if _differ(value, call.values[row])]


def _asked(call: RewardCall, rows: Sequence[int]) -> list[float | None]:
    if call.function is None:
        return []
    columns = {name: [values[row] for row in rows] for name, values in call.columns.items()}
    given = call.function(
        [call.prompts[row] for row in rows], [call.completions[row] for row in rows],
        completion_ids=[call.completion_ids[row] for row in rows], **columns,
    )  # fmt: skip
    return [None if value is None else float(value) for value in given]


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return not torch.isclose(torch.tensor(float(one)), torch.tensor(float(other)), equal_nan=True)
