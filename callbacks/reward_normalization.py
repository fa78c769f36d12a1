r"""Reward normalization: shift and scale the task reward.

.. math::
    s_b \leftarrow \operatorname{clip}\Bigl(\frac{s_b - \mu}{\sigma + \epsilon},\ \pm c\Bigr)

with mean and deviation over the rewarded rows of the batch or of the row's group, or omitted. It takes the place of the
raw reward, which ``reward/task`` still logs. Meant for estimators that do not
normalize, such as GAE.

Source: Engstrom et al. 2020 (Implementation matters), arXiv:2005.12729, on scaling rewards.
"""

import math

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

    Raises:
        ValueError: If a level is unknown or an option is out of range.
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
    ) -> None:
        check_numbers(above=0, clip=clip)
        self.mean: Level = mean
        self.std: Level = std
        self.leave_one_out = leave_one_out
        self.unbiased = unbiased
        self.epsilon = epsilon
        self.clip = clip
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
        scores = rollout.rewards.double()
        return self._estimator.per_row(scores, rollout.groups, rollout.rewarded, self.collectives.sum)
