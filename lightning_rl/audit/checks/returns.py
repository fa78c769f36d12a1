"""Checks of returns: what a critic learns and what it is compared with, computed once more, slowly and in float64."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.advantages import GAE, ReinforcePlusPlus
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Skip, differences, rounding
from lightning_rl.finding import Finding

ESTIMATOR = "estimator {estimator}"
FIT = 1e-3  # of their spread, by which whitened advantages may be off a straight line


def token_advantages(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages along the valid tokens of each row, token by token, [B, T] float64.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 11 to 14, with a value of 0 behind the last token.
    """
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, places in enumerate(valid.cpu()):
        steps = places.nonzero()[:, 0].tolist()
        reward, value = (part[row, steps].double().tolist() for part in (rewards.cpu(), values.cpu()))
        running, following = 0.0, 0.0
        for place in range(len(steps) - 1, -1, -1):
            running = reward[place] + gamma * following - value[place] + gamma * lam * running
            following = value[place]
            advantages[row, steps[place]] = running
    return advantages


@check(
    culprit=ESTIMATOR,
    expected="returns that end with the reward of the last token, and no value of what comes behind it",
    cure="bootstrap nothing past the end: a response that is over has no next value",
)
def returns_end_with_the_reward(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The return of a row's last valid token is its shaped reward: nothing is bootstrapped past the end."""
    rollout, returns = evidence.groups, evidence.groups.returns
    if returns is None:
        yield Skip("no critic learns returns")
        return
    shaped = evidence.signal(rollout)[1]
    last = rollout.valid_tokens & (rollout.valid_tokens.flip(-1).cumsum(-1).flip(-1) == 1)
    values = torch.zeros_like(returns) if rollout.values is None else rollout.values
    size = torch.where(rollout.valid_tokens, returns.abs() + values.abs(), 0.0)
    atol = rounding(rollout.rewards.dtype, float(size.max()) if size.numel() else 0.0)
    end, reward = (torch.where(last, part, 0.0).sum(-1) for part in (returns, shaped))
    yield from differences(end, reward, rollout.sample_ids, observed="something else", atol=atol)


@check(
    culprit=ESTIMATOR,
    expected="the advantages of the definition, whitened once if at all",
    cure="go backwards over the valid tokens alone, with the value of the next one, whitened over the whole batch",
)
def token_returns(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Advantages and returns of GAE and REINFORCE++ that train are those of the definition, over the valid tokens of
    each row, shifted and scaled alike for all rows if they are whitened.
    """
    estimator, rollout = evidence.algorithm.advantages, evidence.groups
    trained = rollout.advantages
    if not isinstance(estimator, GAE | ReinforcePlusPlus) or trained is None:
        yield Skip("the estimator has no definition that is known here")
        return
    critic = isinstance(estimator, GAE)
    shaped, valid = evidence.signal(rollout)[1], rollout.valid_tokens
    values = torch.where(valid, rollout.require("values"), 0.0) if critic else torch.zeros_like(shaped)
    lam = estimator.lam if isinstance(estimator, GAE) else 1.0
    raw = token_advantages(shaped, values, valid, estimator.gamma, lam).to(trained.device)
    scale = float(raw.abs().max() + values.abs().max()) if raw.numel() else 0.0
    atol = rounding(rollout.rewards.dtype, scale, 8 * rollout.width)
    if rollout.returns is not None:
        returns = torch.where(valid, raw + values.double(), 0.0)
        for finding in differences(rollout.returns, returns, rollout.sample_ids, atol=atol):
            yield replace(finding, expected="the returns of the definition", observed="others")
    counted = valid if critic else valid & rollout.rewarded[:, None]
    if isinstance(estimator, GAE) and not estimator.whitened:
        yield from differences(trained, raw, rollout.sample_ids, observed="others", atol=atol)
    elif int(counted.sum()) > 2 and (gap := _bend(raw[counted], trained[counted].double(), atol)) > FIT:
        yield Finding(observed=f"advantages that are off by {gap:.2g} of their spread")
    elif evidence.facts.ranks == 1:
        yield from _scale_findings(evidence, critic=critic)


def _bend(raw: Tensor, trained: Tensor, atol: float) -> float:
    """How far one population is from any straight line of positive slope of the other, in deviations of the first,
    beyond what the other is uncertain by.
    """
    x, y = raw - raw.mean(), trained - trained.mean()
    if float(x.abs().max()) <= 1e-6 * (1.0 + float(raw.abs().max())) or float(y.abs().max()) == 0:
        return 0.0
    slope = float((x * y).sum() / x.square().sum())
    off = (y - slope * x).abs().max() - slope * atol
    return float(off / y.square().mean().sqrt()) if slope > 0 else 2.0


def _scale_findings(evidence: Evidence, *, critic: bool) -> Iterator[Finding]:
    """Whitened advantages of a whole rollout without a mean of 0 and a deviation of 1."""
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
