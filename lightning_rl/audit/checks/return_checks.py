"""Checks of returns and advantages, recomputed by their definition in float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_rl.advantages import GAEOverTurns
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollout import TURNS
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


def _steps(evidence: Evidence) -> list[list[list[int]]]:
    """Return the time steps of the estimator: turns or tokens."""
    valid, turns = evidence.groups.valid_tokens, evidence.groups.token_extras.get(TURNS)
    tokens = torch.arange(valid.shape[1]).expand(valid.shape)
    if not isinstance(evidence.algorithm.advantages, GAEOverTurns):
        return steps_of(valid, tokens)
    return steps_of(valid, torch.ones_like(tokens) if turns is None else turns)
