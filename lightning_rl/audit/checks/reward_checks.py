"""Checks of rewards: each row has the values of its completion, independent of other rows."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isclose, nan
from typing import Any

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.sampling_statistics import turns_of
from lightning_rl.corrections.rl_callback import ROW_REWARDS
from lightning_rl.generation import Completion, Request
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import GREEDY_SCORE
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.utils.finding import Finding

MAX_ROWS = 8
Batches = Sequence[Sequence[tuple[Request, Completion]]]
"""Requests and completions by batch."""


@check(cure="call with all rows in order, and join by sample id")
def reward_rows(evidence: Evidence) -> Iterator[Finding]:
    """The reward of every row is the weighted sum of the values of its completion, joined by sample id."""
    known = samples_of_calls(evidence.batches, evidence.calls)
    mixed_up = [
        (call, wrong)
        for call, samples in zip(evidence.calls, known, strict=True)
        if (wrong := _samples_of_others(evidence, call, samples))
    ]
    for call, wrong in mixed_up:
        yield Finding(
            culprit=f"stage generate, the call of reward {call.name}",
            expected="completions that the engine drew",
            observed=f"something else in {len(wrong)} rows",
            samples=wrong[:4],
        )
    for name, samples in evidence.strange_columns.items():
        yield Finding(
            culprit=f"{evidence.facts.data}stage generate, the columns of reward {name}",
            expected="the columns of the row of the data that each completion answers",
            observed=f"others for {len(samples)} completions",
            samples=samples[:4],
        )
    rollout, sums = evidence.rollout, _weighted_sums(evidence)
    if not mixed_up and (strange := _strange_baselines(evidence, sums)):
        yield Finding(
            culprit="stage generate, the greedy scores of its rows",
            expected="the reward of the greedy answer to the row's own prompt",
            observed=f"something else in {len(strange)} rows",
            samples=strange[:4],
        )
    rows = zip(*(part.tolist() for part in (rollout.sample_ids, rollout.rewards, rollout.rewarded)), strict=True)
    wrong, drawn = [], evidence.drawn_rewards
    for sample, reward, rewarded in rows:
        if rewarded and sample in sums and not _is_sum(reward, sums[sample]):
            wrong.append(sample)
    if wrong and not mixed_up:
        later = all(_is_sum(drawn.get(sample, nan), sums[sample]) for sample in wrong)
        yield Finding(
            culprit="stage signal, a score stored as the reward"
            if later
            else "stage generate, the rewards of its rows",
            expected="the weighted sum of the functions' values, and no reward without one",
            observed=f"something else in {len(wrong)} rows",
            samples=wrong[:4],
        )


def _is_sum(reward: float, total: float) -> bool:
    return isclose(reward, total, rel_tol=1e-3, abs_tol=1e-5)  # False for NaN


def _weighted_sums(evidence: Evidence) -> dict[int, float]:
    """Return the weighted sum of all functions by sample if every call is known.

    NaN, which no row may have as a reward, if a function with a weight failed or none gave a value.
    """
    functions, totals, counts = len({call.name for call in evidence.calls}), dict[int, float](), Counter[int]()
    for call, samples in zip(evidence.calls, samples_of_calls(evidence.batches, evidence.calls), strict=True):
        weight = evidence.facts.reward_weights.get(call.name, 0.0)
        for sample, value in zip(samples, call.values, strict=False):
            counts[sample] += 1
            if value is not None and weight:
                totals[sample] = totals.get(sample, 0.0) + value * weight
    return {sample: totals.get(sample, nan) for sample, count in counts.items() if count == functions}


def _strange_baselines(evidence: Evidence, sums: Mapping[int, float]) -> list[int]:
    """Return the samples whose greedy score is not the reward of a greedy answer to their prompt."""
    rollout, greedy = evidence.rollout, defaultdict[tuple[int, ...], list[float]](list)
    if GREEDY_SCORE not in rollout.extras or evidence.contributions(*ROW_REWARDS):
        return []
    asked = {sample: pairs[0][0] for sample, pairs in evidence.turns.items()}
    for sample, request in asked.items():
        if request.sampling.temperature == 0 and sample in sums:
            greedy[request.prefix_ids].append(sums[sample])
    rows = zip(
        rollout.sample_ids.tolist(), rollout.extras[GREEDY_SCORE].tolist(), rollout.rewarded.tolist(), strict=True
    )
    strange = list[int]()
    for sample, score, rewarded in rows:
        own = greedy[asked[sample].prefix_ids] if rewarded and sample in asked else []
        if own and not any(_is_sum(score, total) for total in own):
            strange.append(sample)
    return strange


def _batches(batches: Batches, size: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """Yield the completions of each batch in slices of the size of a call: samples with token ids."""
    for batch in batches:
        sampled = [(request.sample_id, tuple(completion.token_ids)) for request, completion in last_turns(batch)]
        if len(sampled) >= size:
            yield sampled[:size]
            yield sampled[len(sampled) - size :]


def _is_answer(completion: Any, prompt: Any, text: str) -> bool:
    """Return True if a completion is the text, or ends with a message of it, after what the prompt began."""
    if isinstance(completion, str):
        return bool(completion == text)
    begun = prompt[-1].get("content") if prompt[-1].get("role") == "assistant" else None
    return completion[-1].get("content") == f"{begun or ''}{text}"


def _samples_of_others(evidence: Evidence, call: RewardCall, samples: Sequence[int]) -> list[int]:
    """Return the samples whose call contains the completion of another row."""
    asked, text = [tuple(ids) for ids in call.completion_ids], evidence.text
    if samples and text is not None:
        rows = zip(samples[:MAX_ROWS], asked, call.prompts, call.completions, strict=False)
        return [sample for sample, ids, prompt, completion in rows if not _is_answer(completion, prompt, text(ids))]
    for batch in [] if samples else _batches(evidence.batches, len(asked)):
        if Counter(ids for _, ids in batch) == Counter(asked):
            return [sample for (sample, ids), other in zip(batch, asked, strict=True) if ids != other]
    drawn = {tuple(completion.token_ids) for batch in evidence.batches for _, completion in batch}
    if samples or not drawn or evidence.rollout.segments is not None or drawn.issuperset(asked):
        return []
    return evidence.rollout.sample_ids.tolist()[: sum(ids not in drawn for ids in asked)]


@check(expected="the same value for a completion in every batch", cure="score each row independently")
def reward_order(evidence: Evidence) -> Sequence[Finding | Skip]:
    """The reward of a completion does not depend on the other rows of a call or their order.

    A copy of the function is called again if it is deterministic and quick.
    """
    return _replies(evidence, "reward_order")


@check(
    expected="the same value for a completion after every other call",
    observed="other values after a call about other rows",
    cure="keep no state that depends on rows between calls, or declare it: reward.remembers = True",
)
def reward_memory(evidence: Evidence) -> Sequence[Finding | Skip]:
    """The reward of a completion does not depend on the rows of earlier calls.

    Two copies of the function with different earlier calls return the same value. So a memo is keyed by every argument
    that counts: the completion, its prompt and its columns.
    """
    return _replies(evidence, "reward_memory")


@check(
    expected="unmodified arguments",
    cure="edit copies: the edits change what is scored",
)
def reward_inputs(evidence: Evidence) -> Sequence[Finding | Skip]:
    """A reward does not edit its arguments."""
    return _replies(evidence, "reward_inputs")


def _replies(evidence: Evidence, check: str) -> list[Finding | Skip]:
    return [reply[check] for reply in evidence.replies if check in reply]


def samples_of_calls(batches: Batches, calls: Sequence[RewardCall]) -> list[list[int]]:
    """Return the samples of each reward call in order; empty if the call is about something else.

    Functions are called in the order of the engine's batches. Equal completions belong to the first batch without an
    earlier call of the function.
    """
    begins, samples = defaultdict[str, tuple[int, int]](lambda: (0, 0)), list[list[int]]()
    last = [last_turns(batch) for batch in batches]
    drawn = [[tuple(completion.token_ids) for _, completion in batch] for batch in last]
    for call in calls:
        asked = [tuple(ids) for ids in call.completion_ids]
        place = _place_of(drawn, asked, begins[call.name])
        if place is None:
            samples.append([])
            continue
        batch, first = place
        begins[call.name] = batch, first + len(asked)
        samples.append([request.sample_id for request, _ in last[batch][first : first + len(asked)]])
    return samples


def last_turns(batch: Sequence[tuple[Request, Completion]]) -> list[tuple[Request, Completion]]:
    """Return the last turn of each sample, which rewards score, in the order of the requests."""
    return [turns[-1] for turns in turns_of([batch]).values()]


def _place_of(
    drawn: Sequence[Sequence[tuple[int, ...]]], asked: Sequence[tuple[int, ...]], begin: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the first batch and row from ``begin`` on whose completions are those of a call."""
    for batch, answers in enumerate(drawn):
        for first in (0, len(answers) - len(asked)):
            if first >= 0 and (batch, first) >= begin and answers[first : first + len(asked)] == asked:
                return batch, first
    return None
