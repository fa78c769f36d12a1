r"""Reward normalisation: shift and scale the task reward before anything else is made of it.

.. math::
    s_b \leftarrow \operatorname{clip}\Bigl(\frac{s_b - \mu}{\sigma + \epsilon},\ \pm c\Bigr)

with mean and deviation over the rewarded rows of the whole batch or of the row's group, or left out. It is contributed
as a bonus, the difference to the raw reward, which stays as it is: ``reward/task`` is still what the task gave. Meant
for estimators that take the reward as it comes, such as GAE.

Source: Engstrom et al. 2020 (Implementation matters), arXiv:2005.12729, on scaling rewards.
"""

import math

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages import Level, Normalized
from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import masked_fill_invalid


class RewardNormalization(RLCallback):
    """Normalises the task reward.

    Logs ``reward_normalization/reward``, the mean of what comes out over the rewarded rows, and
    ``reward_normalization/clipped``, the fraction that the clip changed.

    Args:
        mean: what the subtracted mean runs over: ``"batch"``, ``"group"`` or ``"none"``.
        std: what the standard deviation runs over.
        leave_one_out: subtract the mean of the other rows.
        unbiased: whether the variance divides by n - 1 instead of n.
        epsilon: added to the standard deviation.
        clip: bound of what comes out, on either side, above 0.

    Raises:
        ValueError: if a level is unknown or an option out of range.
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
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        normal = self._normal(rollout).clamp(-self.clip, self.clip)
        return normal - masked_fill_invalid(rollout.rewards, rollout.rewarded).double()  # exact for large rewards

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        normal = self._normal(rollout)
        figures = {"reward": normal.clamp(-self.clip, self.clip), "clipped": normal.abs() > self.clip}
        return {f"reward_normalization/{what}": stat for what, stat in Stat.many(figures, rollout.rewarded).items()}

    @property
    def _estimator(self) -> Normalized:
        return Normalized(
            mean=self.mean,
            std=self.std,
            leave_one_out=self.leave_one_out,
            unbiased=self.unbiased,
            epsilon=self.epsilon,
        )

    def _normal(self, rollout: Rollout) -> Tensor:
        scores = rollout.rewards.double()
        return self._estimator.per_row(scores, rollout.groups, rollout.rewarded, self.collectives.sum)
