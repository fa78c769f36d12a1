"""RawReward: REINFORCE without a baseline."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import RowEstimator
from lightning_rl.signal.masked import masked_fill_invalid


@dataclass(frozen=True, slots=True)
class RawReward(RowEstimator):
    """Score without a baseline, independent of groups.

    .. math::
        A_i = s_i

    Source: Williams 1992.
    """

    within_groups = True

    @override
    def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Float[Tensor, " B"]:
        del groups
        return masked_fill_invalid(scores, rewarded)
