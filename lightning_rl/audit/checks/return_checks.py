"""Checks of returns and advantages, recomputed by their definition in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.advantages import GAE, Estimator, GAEOverTurns, LengthAdaptive, ReinforcePlusPlus, TraceDecay
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollout import turn_numbers
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip, differences, rounding
from lightning_rl.utils.finding import Finding

ESTIMATOR = "estimator {estimator}"
OF_OTHER_RANKS = "a reward depends on the rows of other ranks"
FIT = 1e-3  # maximum distance of whitened advantages from a line, relative to their spread


def steps_of(valid: Tensor, turns: Tensor) -> list[list[list[int]]]:
    """Return the time steps of each row as lists of the valid tokens of each turn."""
    rows = []
    for places, numbers in zip(valid.cpu(), turns.cpu().tolist(), strict=True):
        steps: dict[int, list[int]] = {}
        for place in places.nonzero()[:, 0].tolist():
            steps.setdefault(numbers[place], []).append(place)
        rows.append(list(steps.values()))
    return rows


def step_advantages(
    rewards: Tensor, values: Tensor, steps: list[list[list[int]]], gamma: float, lam: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return generalized advantages along the steps of each row, and the value of each step, at all its tokens.

    A step has the rewards of all its tokens and the value of the first. Both are [B, T] float64.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 11 to 14, with a value of 0 after the last step.
    """
    advantages, at_steps = torch.zeros(2, *rewards.shape, dtype=torch.float64).unbind()
    for row, places in enumerate(steps):
        reward, value = (part[row].double().tolist() for part in (rewards.cpu(), values.cpu()))
        running, following = 0.0, 0.0
        for step in reversed(places):
            before = value[step[0]]
            running = sum(reward[place] for place in step) + gamma * following - before + gamma * lam[row] * running
            following = before
            advantages[row, step], at_steps[row, step] = running, before
    return advantages, at_steps


@check(
    culprit=ESTIMATOR,
    expected="returns that end with the reward of the last token, without a value after it",
    cure="do not bootstrap past the end: a finished response has no next value",
)
def returns_end_with_the_reward(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Nothing is bootstrapped past the end: the last return is the shaped reward of its token, or of its turn."""
    rollout, returns = evidence.groups, evidence.groups.returns
    if returns is None:
        yield Skip("there are no returns, since there is no critic")
        return
    if (shaped := evidence.rewards_of_run) is None:
        yield Skip(OF_OTHER_RANKS)
        return
    last = rollout.valid_tokens & (rollout.valid_tokens.flip(-1).cumsum(-1).flip(-1) == 1)
    values = torch.zeros_like(returns) if rollout.values is None else rollout.values
    size = torch.where(rollout.valid_tokens, returns.abs() + values.abs(), 0.0)
    atol = rounding(rollout.rewards.dtype, float(size.max()) if size.numel() else 0.0)
    ends = torch.zeros_like(last)
    for row, steps in enumerate(_steps(evidence)):
        ends[row, [place for step in steps[-1:] for place in step]] = True
    end, reward = torch.where(last, returns, 0.0).sum(-1), torch.where(ends, shaped, 0.0).sum(-1)
    yield from differences(end, reward, rollout.sample_ids, observed="something else", atol=atol)


@check(
    culprit=ESTIMATOR,
    expected="the advantages of the definition, whitened once if at all",
    cure="iterate backwards over the valid tokens with the value of the next one, and whiten over the whole batch",
)
def token_returns(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Advantages and returns of GAE, over tokens or turns, and of REINFORCE++ are those of the definition.

    Whitening shifts and scales them equally for all rows.
    """
    estimator, rollout = evidence.algorithm.advantages, evidence.groups
    trained = rollout.advantages
    if not isinstance(estimator, GAE | GAEOverTurns | ReinforcePlusPlus) or trained is None:
        yield Skip(f"{evidence.names['estimator']} is not GAE, GAEOverTurns or ReinforcePlusPlus")
        return
    if (shaped := evidence.rewards_of_run) is None:
        yield Skip(OF_OTHER_RANKS)
        return
    critic = not isinstance(estimator, ReinforcePlusPlus)
    valid, steps = rollout.valid_tokens, _steps(evidence)
    values = torch.where(valid, rollout.require("values"), 0.0) if critic else torch.zeros_like(shaped)
    own, critics = _decays(estimator, steps)
    raw, at_steps = (part.to(trained.device) for part in step_advantages(shaped, values, steps, estimator.gamma, own))
    scale = float(raw.abs().max() + values.abs().max()) if raw.numel() else 0.0
    atol = rounding(rollout.rewards.dtype, scale, 8 * rollout.width)
    if rollout.returns is not None:
        learned, _ = step_advantages(shaped, values, steps, estimator.gamma, critics)
        returns = torch.where(valid, learned.to(trained.device) + at_steps, 0.0)
        for finding in differences(rollout.returns, returns, rollout.sample_ids, atol=atol):
            yield replace(finding, expected="the returns of the definition", observed="others")
    counted = valid if critic else valid & rollout.rewarded[:, None]
    if not isinstance(estimator, ReinforcePlusPlus) and not estimator.whitened:
        yield from differences(trained, raw, rollout.sample_ids, observed="others", atol=atol)
    elif int(counted.sum()) > 2 and (gap := _bend(raw[counted], trained[counted].double(), atol)) > FIT:
        yield Finding(observed=f"advantages that differ by {gap:.2g} of their spread")
    elif evidence.facts.ranks == 1:
        yield from _scale_findings(evidence, critic=critic)


def _steps(evidence: Evidence) -> list[list[list[int]]]:
    """Return the time steps of the estimator: turns or tokens."""
    groups, valid = evidence.groups, evidence.groups.valid_tokens
    tokens = torch.arange(valid.shape[1]).expand(valid.shape)
    if not isinstance(evidence.algorithm.advantages, GAEOverTurns):
        return steps_of(valid, tokens)
    return steps_of(valid, torch.ones_like(tokens) if groups.segments is None else turn_numbers(groups))


def _decays(estimator: Estimator, steps: list[list[list[int]]]) -> tuple[list[float], list[float]]:
    """Return the decay of each row, for the advantages and for the critic's returns."""
    lam: float | TraceDecay = getattr(estimator, "lam", 1.0)
    critic: float | TraceDecay | None = getattr(estimator, "lam_critic", None)
    number = torch.tensor([len(row) for row in steps], dtype=torch.int64)

    def of_rows(decay: float | TraceDecay) -> list[float]:
        if isinstance(decay, LengthAdaptive):
            return [max(1 - 1 / (decay.alpha * max(len(row), 1)), 0.0) for row in steps]
        return decay(number).tolist() if isinstance(decay, TraceDecay) else [decay] * len(steps)

    return of_rows(lam), of_rows(lam if critic is None else critic)


def _bend(raw: Tensor, trained: Tensor, atol: float) -> float:
    """Return the largest distance of a population from a line of positive slope in the other, in deviations.

    The uncertainty of the other is subtracted.
    """
    x, y = raw - raw.mean(), trained - trained.mean()
    if float(x.abs().max()) <= 1e-6 * (1.0 + float(raw.abs().max())) or float(y.abs().max()) == 0:
        return 0.0
    slope = float((x * y).sum() / x.square().sum())
    off = (y - slope * x).abs().max() - slope * atol
    return float(off / y.square().mean().sqrt()) if slope > 0 else 2.0


def _scale_findings(evidence: Evidence, *, critic: bool) -> Iterator[Finding]:
    """Yield a finding if whitened advantages of a rollout lack a mean of 0 and a deviation of 1."""
    rollout = evidence.rollout
    counted = rollout.valid_tokens if critic else rollout.valid_tokens & rollout.rewarded[:, None]
    values = rollout.require("advantages")[counted].double()
    if len(values) < 2 or float(values.abs().max()) == 0:
        return
    mean, deviation = float(values.mean()), float(values.std())
    if abs(mean) > FIT * float(values.abs().max()) or abs(deviation - 1) > FIT:
        yield Finding(
            expected="a mean of 0 and a deviation of 1 over the batch",
            observed=f"a mean of {mean:.3g} and a deviation of {deviation:.3g}",
        )
