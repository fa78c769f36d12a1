"""Statistics and shaped rewards by their definition, in float64."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rl.corrections import Corrections, RLCallback, Stat
from lightning_rl.corrections.stat import StatReduction
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties.comparisons import rounding


def population(values: Tensor, reduction: StatReduction = "mean") -> Stat:
    """Return the statistic of numbers by its definition, in float64."""
    exact = values.detach().double().flatten().cpu()
    count, mean = float(len(exact)), float(exact.mean()) if len(exact) else 0.0
    squares = float((exact - mean).square().sum())
    maximum = float(exact.max()) if len(exact) else -math.inf
    return Stat(torch.tensor([count, mean, squares, maximum], dtype=torch.float64), reduction)


def merge(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Merge statistics of disjoint populations; a name may be missing in some.

    Source: the definitions of count, mean and sum of squares: the squares of both parts around zero add up.
    """
    merged: dict[str, Stat] = {}
    for name, stat in (item for part in parts for item in part.items()):
        merged[name] = _join(merged[name], stat) if name in merged else Stat(stat.moments.cpu(), stat.reduction)
    return merged


def value_of(stat: Stat) -> float:
    """Return the number to log by its definition; NaN for an empty population."""
    count, mean, squares, maximum = stat.moments.tolist()
    if not count:
        return math.nan
    weight = squares + count * mean**2  # sum of all squares
    return {
        "mean": mean,
        "sum": count * mean,
        "max": maximum,
        "std": math.sqrt(squares / max(count - 1, 1)),
        "ess": count * mean**2 / weight if mean else math.nan,
    }[stat.reduction]


def _join(one: Stat, other: Stat) -> Stat:
    (n, mean, squares, high), (m, further, others, higher) = one.moments.tolist(), other.moments.tolist()
    total = n + m
    if not total:
        return one
    joint = (n * mean + m * further) / total
    spread = squares + others + n * (mean - joint) ** 2 + m * (further - joint) ** 2
    return Stat(torch.tensor([total, joint, spread, max(high, higher)], dtype=torch.float64), one.reduction)


def is_figure(figure: float, stat: Stat, scale: float = 0.0) -> bool:
    """Return True if a number is the value of a statistic up to rounding of its largest number or ``scale``."""
    count, mean, squares, maximum = stat.moments.tolist()
    truth = value_of(stat)
    if math.isnan(truth):
        return True
    spread = math.sqrt(squares / count) if count else 0.0
    size = max(abs(mean) + spread, abs(maximum) if math.isfinite(maximum) else 0.0, abs(truth), scale)
    return abs(figure - truth) <= rounding(torch.float32, size, 256)


def figure_of(moments: Sequence[Tensor], reduction: StatReduction) -> tuple[float, float]:
    """Return population and value of a metric that was logged in several parts."""
    joint = merge({"": Stat(part.cpu(), reduction)} for part in moments)[""]
    return float(joint.moments[0]), value_of(joint)


def shaped_parts(rollout: Rollout, corrections: Corrections) -> tuple[Tensor, Tensor]:
    """Return the score of each row, [B], and the token rewards, [B, T], in float64."""
    rewards = rollout.rewards
    for callback in corrections.contributors("replace_reward"):
        rewards = callback.replace_reward(rollout)
    scores = torch.where(rollout.rewarded, rewards.double(), 0.0)
    for callback in corrections.contributors("reward_bonus"):
        scores = scores + callback.reward_bonus(rollout).double()
    nothing = torch.zeros(rollout.valid_tokens.shape, dtype=torch.float64, device=scores.device)
    return scores, sum(token_parts(rollout, corrections).values(), nothing)


def token_parts(rollout: Rollout, corrections: Corrections) -> dict[RLCallback, Tensor]:
    """Return the token rewards of each callback, [B, T], in float64 and 0 at other than valid tokens."""
    giving = corrections.contributors("token_reward")
    return {one: torch.where(rollout.valid_tokens, one.token_reward(rollout).double(), 0.0) for one in giving}
