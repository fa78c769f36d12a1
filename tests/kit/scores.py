"""Scores: what rewards give rows outside of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_rl import Rollout
from lightning_rl.rewards import RewardCall, Rewards


@dataclass(frozen=True)
class Scores:
    """Calls, with the total, each function's values, and the rows that are rewarded and that failed."""

    calls: Sequence[RewardCall]
    total: Tensor
    raw: Mapping[str, Tensor]
    scored: Tensor
    failed: Tensor


def scores_of(
    rewards: Any, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Any, **options: Any
) -> Scores:
    """Scores of some rows, all of which train."""
    rewards, number = Rewards.of(rewards), len(prompts)
    calls = rewards(prompts, completions, completion_ids=completion_ids, **options)
    rows = Rollout.of_samples([[1]] * number, [[1]] * number, groups=range(number))
    filled = rewards.fill(rows, calls)
    failed = rewards.failed_rows(calls, number)
    return Scores(calls, filled.rewards, filled.rewards_by_function, filled.rewarded, failed)
