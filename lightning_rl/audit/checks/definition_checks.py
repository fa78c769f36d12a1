"""Checks of estimators on made-up rewards: published formulas, two ranks, ties and constants; ``pass@k``."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.advantages import (
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    Estimator,
    HierarchicalGRPO,
    MaxRL,
    Normalized,
    PassAtK,
    RawReward,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    RewardSignal,
    RowEstimator,
)
from lightning_rl.audit.evidence import Evidence
from lightning_rl.distributed.threaded_ranks import ThreadedRanks
from lightning_rl.evaluation.tally import COLUMNS, Tally
from lightning_rl.rollout import role_number
from lightning_rl.samples import POLICY
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip, differences
from lightning_rl.utils.finding import Finding

PROMPTS, WIDTH, SIZE = 6, 4, 4
FORMULA = ("__call__", "per_row", "relative")
SMALL, PATIENCE = 1e-6, 5.0  # difference of tied rewards; seconds for ranks to join a collective


class _Group(NamedTuple):
    """Rewarded rows of a group, and of the batch."""

    scores: list[float]
    others: list[float]  # without the row
    lengths: list[int]
    batch: list[float]
    equal: int  # rewarded rows of the batch in groups of equal scores


def _std(values: list[float], *, unbiased: bool) -> float:
    return statistics.stdev(values) if unbiased else statistics.pstdev(values)


def _normalize(estimator: Any, score: float, group: _Group) -> float:
    populations = {"group": group.scores, "batch": group.batch, "none": [0.0]}
    center, spread = populations[estimator.mean], populations[estimator.std]
    if any(len(set(part)) < 2 for part in (center, spread) if part != [0.0]):
        return 0.0
    if estimator.leave_one_out:
        center = center.copy()
        center.remove(score)
    scale = 1.0 if estimator.std == "none" else _std(spread, unbiased=estimator.unbiased) + estimator.epsilon
    return (score - statistics.fmean(center)) / scale


def _gpg(estimator: Any, score: float, group: _Group) -> float:
    zeros = sum(one == 0 for one in group.batch) if estimator.teaches == "nonzero" else group.equal
    return len(group.batch) / max(len(group.batch) - zeros, 1) * (score - statistics.fmean(group.scores))


def _pass_at_k(estimator: Any, score: float, group: _Group) -> float:
    gap = max(score - max(group.others), 0.0)
    return gap / (_std(group.scores, unbiased=estimator.unbiased) + estimator.epsilon) if estimator.scaled else gap


def _opo(_estimator: Any, score: float, group: _Group) -> float:
    weighted = sum(length * one for length, one in zip(group.lengths, group.scores, strict=True))
    return score - weighted / sum(group.lengths)


PER_ROW: Mapping[type, Callable[[Any, float, _Group], float]] = {
    GRPO: lambda one, score, group: (
        (score - statistics.fmean(group.scores)) / (_std(group.scores, unbiased=one.unbiased) + one.epsilon)
    ),
    DrGRPO: lambda _, score, group: score - statistics.fmean(group.scores),
    RLOO: lambda _, score, group: score - statistics.fmean(group.others),
    MaxRL: lambda one, score, group: score / (statistics.fmean(group.scores) + one.epsilon) - 1,
    OPO: _opo,
    GPG: _gpg,
    PassAtK: _pass_at_k,
}
"""Advantage of a row in a group of different scores. Source: the docstrings of :mod:`lightning_rl.advantages`."""
ANYWHERE = {RawReward: lambda _one, score, _group: score, Normalized: _normalize}
TOKENS = (ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax, HierarchicalGRPO)


def random_signal(size: int, estimator: Estimator) -> RewardSignal:
    """Return a signal with token rewards, unrewarded rows, a group of equal scores, and tokens that are attempts."""
    number, role = torch.arange(PROMPTS * size), role_number(getattr(estimator, "role", POLICY))
    groups = number // size
    scores = (1.5 + torch.sin(1.0 + 3.0 * number.double())) * (groups != 1) + 0.75 * (groups == 1)
    scores[3] = 0.0
    valid = torch.arange(WIDTH) < (1 + number % WIDTH)[:, None]
    valid[2, 0] = False
    tokens = torch.where(valid, -0.3 * torch.cos(number[:, None] + 2.0 * torch.arange(WIDTH)).double(), 0.0)
    rewarded = (number % (2 * size)) != 2
    last = valid & (valid.flip(-1).cumsum(-1).flip(-1) == 1)
    shaped = tokens + torch.where(last & rewarded[:, None], scores[:, None], 0.0)
    return RewardSignal(
        scores=torch.where(rewarded, scores, 0.0),
        rewarded=rewarded,
        groups=groups,
        valid_tokens=valid,
        token_rewards=tokens,
        shaped=shaped,
        values=0.5 * tokens,
        greedy=0.2 + 0.1 * groups.double(),
        old_logprobs=tokens - 1.0,
        rollout_logprobs=tokens - 1.0,
        sum_pi_squared=torch.full_like(tokens, 0.5),
        turn_rewards=torch.where(rewarded[:, None], 0.5 * tokens, 0.0),
        roles=torch.where(torch.arange(WIDTH) > 0, role, role_number(POLICY)).expand_as(valid),
        attempts=torch.arange(WIDTH).expand_as(valid),
    )


def kind_of(estimator: Estimator) -> type | None:
    """Return the class of the library whose formula an estimator has, also as a subclass; None if it has another."""
    for kind in (*PER_ROW, *ANYWHERE, *TOKENS):
        if isinstance(estimator, kind):
            own = [getattr(type(estimator), name, None) is getattr(kind, name, None) for name in FORMULA]
            return kind if all(own) else None
    return None


def _by_definition(kind: type, estimator: Any, signal: RewardSignal) -> Tensor:
    """Return the advantages of a known estimator, [B, T] float64."""
    valid, rewarded, scores = signal.valid_tokens, signal.rewarded.tolist(), signal.scores.tolist()
    groups, lengths = signal.groups.tolist(), valid.sum(-1).tolist()
    peers = [[other for other, same in enumerate(groups) if same == group and rewarded[other]] for group in groups]
    batch = [row for row, counts in enumerate(rewarded) if counts]
    equal = sum(len({scores[other] for other in peers[row]}) < 2 for row in batch)

    def per_row(formula: Callable[[Any, float, _Group], float], *, compares: bool) -> list[float]:
        found = []
        for row, members in enumerate(peers):
            group = _Group(
                [scores[other] for other in members],
                [scores[other] for other in members if other != row],
                [lengths[other] for other in members],
                [scores[other] for other in batch],
                equal,
            )
            alive = rewarded[row] and (not compares or len(set(group.scores)) > 1)
            found.append(formula(estimator, scores[row], group) if alive else 0.0)
        return found

    if kind is HierarchicalGRPO:
        return _two_levels(estimator, signal)
    if kind in PER_ROW or kind in ANYWHERE:
        compares = kind in PER_ROW
        rows = per_row(PER_ROW[kind] if compares else ANYWHERE[kind], compares=compares)
        return torch.where(valid, torch.tensor(rows, dtype=torch.float64)[:, None], 0.0)
    gamma = estimator.gamma if kind is ReinforcePlusPlus else 1.0
    raw = torch.zeros(valid.shape, dtype=torch.float64)
    centered = per_row(PER_ROW[DrGRPO], compares=True)
    for row in range(len(groups)):
        places = valid[row].nonzero()[:, 0].tolist()
        for place in places:
            later = [
                float(signal.shaped[row, other]) * gamma**step
                for step, other in enumerate(other for other in places if other >= place)
            ]
            baseline = float(signal.require("greedy", "ReMax")[row]) if kind is ReMax and rewarded[row] else 0.0
            raw[row, place] = sum(later) - baseline
            if kind is ReinforcePlusPlusBaseline:
                raw[row, place] = centered[row] + float(signal.token_rewards[row, place])
    if kind is ReMax:
        return raw
    counted = [float(raw[row, place]) for row, place in valid.nonzero().tolist() if rewarded[row]]
    mean, deviation = statistics.fmean(counted), statistics.stdev(counted)
    shift = torch.where(signal.rewarded, mean, 0.0)[:, None]
    return torch.where(valid, (raw - shift) / deviation, 0.0)


def _two_levels(estimator: HierarchicalGRPO, signal: RewardSignal) -> Tensor:
    """Return advantages between tokens of a role in a row, which are attempts, and of the rest between the rows."""
    own = signal.valid_tokens & (signal.require("roles", "it") == role_number(estimator.role))
    returns = torch.where(own, signal.require("turn_rewards", "it"), 0.0)
    level = partial(_by_definition, type(estimator.comparison), estimator.comparison)
    one_each = {"valid_tokens": own.reshape(-1, 1), "groups": torch.arange(len(own)).repeat_interleave(WIDTH)}
    rewarded = (own & signal.rewarded[:, None]).flatten()
    attempts = level(replace(signal, scores=returns.flatten(), rewarded=rewarded, **one_each))
    return torch.where(own, attempts.view(own.shape), level(replace(signal, scores=signal.scores - returns.sum(-1))))


@check(
    culprit="estimator {estimator}",
    expected="the advantages of the published formula, from made-up rewards",
    cure="take every mean and deviation over the rewarded rows, and add token rewards",
    of_rows=False,
)
def advantage_formula(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Advantages of an estimator of the library, or of a subclass with its formula, are those of the formula.

    Any other estimator per row, if it doubles with the rewards and compares rows, ignores a constant added to all
    rewards. A tie gives advantages like almost equal rewards.
    """
    estimator = evidence.algorithm.advantages
    kind, signal = kind_of(estimator), random_signal(evidence.facts.group_size or SIZE, estimator)
    if kind is not None:
        ours, theirs = estimator(signal.clone()).advantages, _by_definition(kind, estimator, signal)
        wrong = list(differences(ours, theirs, torch.arange(len(ours)), rtol=1e-5, atol=1e-5))
        if wrong:
            gap = float((ours - theirs).abs().max())
            yield Finding(observed=f"others, up to {gap:.3g} away")
    elif isinstance(estimator, RowEstimator) and estimator.within_groups:
        yield from _odd_rows(estimator, replace(signal, rewarded=torch.ones_like(signal.rewarded)))
    else:
        yield Skip(f"{evidence.names['estimator']} is no estimator with a formula of the audit")


def _odd_rows(estimator: RowEstimator, signal: RewardSignal) -> Iterator[Finding]:
    """Yield a finding if advantages per row move with a constant, or jump at a tie."""

    def at(scores: Tensor) -> Tensor:
        return estimator.per_row(scores.clone(), signal.groups.clone(), signal.rewarded.clone()).double()

    scores = 2.0 + torch.sin(1.0 + 3.0 * torch.arange(len(signal.scores), dtype=torch.float64))
    second = torch.zeros_like(scores)
    second[1] = 1.0
    plain, size = at(scores), float(at(scores).abs().max())
    doubles = bool(((at(2 * scores) - 2 * plain).abs() <= 1e-4 * size).all())
    compares = bool((at(scores + 0.1 * second) - plain)[0].abs() > 1e-3 * size)
    if doubles and compares and float((at(scores + 1.0) - plain).abs().max()) > 1e-3 * size:
        expected = "advantages that a constant added to all rewards does not change, since they compare rows"
        cure = "subtract a baseline whose weights add up to 1, such as the mean of the n - 1 others"
        yield Finding(expected=expected, observed="others", cure=cure)
    tied = scores + second * (scores[0] - scores[1])
    smooth = bool((at(scores + SMALL * second) - plain).abs().max() <= 1e-3 * size)
    if compares and smooth and float((at(tied + SMALL * second) - at(tied)).abs().max()) > 1e-2 * size:
        expected = "advantages of equal rewards like those of almost equal ones"
        yield Finding(expected=expected, observed="others", cure="count every row in means and deviations")


@check(
    culprit="estimator {estimator}",
    expected="the same advantages for every split of the rows over ranks",
    observed="others on two ranks",
    cure="sum over ranks with signal.global_sum",
    of_rows=False,
)
def advantage_ranks(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Advantages do not depend on the split of prompts over ranks; own estimators count in runs on several ranks."""
    estimator = evidence.algorithm.advantages
    if evidence.facts.ranks == 1 and kind_of(estimator) is None:
        yield Skip("the run has one rank, and the estimator is not that of the library")
        return
    signal, ranks = random_signal(evidence.facts.group_size or SIZE, estimator), ThreadedRanks(2, timeout=PATIENCE)
    whole, half = estimator(signal.clone()).advantages, signal.groups < PROMPTS // 2
    jobs = [partial(_share, estimator, signal, rows, ranks.sum) for rows in (half, ~half)]
    shares = torch.cat(ranks.run(jobs, threads=torch.get_num_threads()))
    if not torch.allclose(shares, whole, rtol=1e-5, atol=1e-6):
        yield Finding()


def _share(estimator: Estimator, signal: RewardSignal, rows: Tensor, global_sum: Any) -> Tensor:
    part = {name: tensor[rows] for name, tensor in signal.tensors()}
    return estimator(replace(signal, **part, global_sum=global_sum)).advantages


@check(expected="the share of solved draws among all draws of k samples", cure="1 - C(n - c, k) / C(n, k)")
def evaluation_figures(evidence: Evidence) -> Iterator[Finding]:
    """``pass@k`` of an evaluation is its unbiased estimator, for every number of solved samples."""
    for name, samples, pass_at in evidence.facts.evaluations:
        tally, numbers = Tally(samples + 1, ()), range(samples + 1)
        rows = [[samples, samples, 0, samples, solved, *[0] * (len(COLUMNS) - 5)] for solved in numbers]
        tally.update(torch.arange(samples + 1), torch.tensor(rows, dtype=torch.float64))
        figures = tally.figures(pass_at=pass_at, samples=samples, votes=False)
        for k in pass_at:
            exact = 1 - sum(math.comb(samples - solved, k) for solved in numbers) / math.comb(samples, k) / (
                samples + 1
            )
            if not math.isclose(figures[f"pass@{k}"], exact, rel_tol=1e-9):
                observed = f"{figures[f'pass@{k}']:.4g} instead of {exact:.4g} on average over all numbers"
                yield Finding(culprit=f"pass@{k} of evaluation {name}", observed=observed)
