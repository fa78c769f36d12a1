r"""Reward normalization: shift and scale the task reward.

.. math::
    s_b \leftarrow \operatorname{clip}\Bigl(\frac{s_b - \mu}{\sigma + \epsilon},\ \pm c\Bigr)

with mean and deviation over the rewarded rows of the batch or of the row's group, or omitted. It takes the place of the
raw reward, which ``reward/task`` still logs. Meant for estimators that do not
normalize, such as GAE.

With ``weights``, each reward function is normalized by itself, and the weighted sum takes the place of the reward. GDPO
is ``RewardNormalization("group", "group", weights=...)`` with the estimator ``Normalized(mean="batch", std="batch")``.

Source: Engstrom et al. 2020 (Implementation matters), arXiv:2005.12729, on scaling rewards; Liu et al. 2026 (GDPO),
arXiv:2601.05242, on reward functions one by one.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages import Level, Normalized
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.utils.arguments import check_numbers


class RewardNormalization(RLCallback):
    """Normalization of the task reward.

    Logs the mean normalized reward of the rewarded rows as ``reward_normalization/reward`` and the fraction of clipped
    values as ``reward_normalization/clipped``.

    Args:
        mean: Population of the subtracted mean: ``"batch"``, ``"group"`` or ``"none"``.
        std: Population of the standard deviation: ``"batch"``, ``"group"`` or ``"none"``.
        leave_one_out: Subtract the mean of the other rows.
        unbiased: Divide the variance by n - 1 instead of n.
        epsilon: Constant added to the standard deviation.
        clip: Bound of the absolute normalized reward, above 0.
        weights: Weight of each reward function by name, in place of those of the module's ``rewards``, to normalize
            the functions one by one over the rows to which they apply; None to normalize their sum.

    Raises:
        ValueError: If a level is unknown or an option is out of range; in a run, if ``weights`` names other functions.
    """

    name = "reward_normalization"
    compares_rows = True

    def __init__(
        self,
        mean: Level = "batch",
        std: Level = "batch",
        *,
        leave_one_out: bool = False,
        unbiased: bool = True,
        epsilon: float = 1e-6,
        clip: float = math.inf,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        check_numbers(above=0, clip=clip)
        if not all(map(math.isfinite, (weights or {}).values())):
            raise ValueError(f"expected finite weights, got {weights}")
        self.mean: Level = mean
        self.std: Level = std
        self.leave_one_out = leave_one_out
        self.unbiased = unbiased
        self.epsilon = epsilon
        self.clip = clip
        self.weights = None if weights is None else dict(weights)
        self.compares_groups = self._estimator.compares
        self.batch_statistics = not self._estimator.within_groups

    @override
    def replace_reward(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return self._normalize(rollout).clamp(-self.clip, self.clip)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        normalized = self._normalize(rollout)
        values = {"reward": normalized.clamp(-self.clip, self.clip), "clipped": normalized.abs() > self.clip}
        return {f"reward_normalization/{key}": stat for key, stat in Stat.many(values, rollout.rewarded).items()}

    @property
    def _estimator(self) -> Normalized:
        return Normalized(
            mean=self.mean,
            std=self.std,
            leave_one_out=self.leave_one_out,
            unbiased=self.unbiased,
            epsilon=self.epsilon,
        )

    def _normalize(self, rollout: Rollout) -> Tensor:
        if self.weights is None:
            return self._per_row(rollout, rollout.rewards.double(), rollout.rewarded)
        if self.weights.keys() != rollout.rewards_by_function.keys():
            names = ", ".join(rollout.rewards_by_function)
            raise ValueError(f"expected weights of RewardNormalization for {names}, got {', '.join(self.weights)}")
        total = torch.zeros_like(rollout.rewards, dtype=torch.float64)
        for name, weight in self.weights.items():
            raw = rollout.rewards_by_function[name].double()
            total += weight * self._per_row(rollout, raw.nan_to_num(), rollout.rewarded & ~raw.isnan())
        return total

    def _per_row(self, rollout: Rollout, scores: Tensor, rewarded: Tensor) -> Tensor:
        return self._estimator.per_row(scores, rollout.groups, rewarded, self.collectives.sum)
