"""GPG: centred rewards, divided by the share of rows that teach."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.base import Advantages, RewardSignal, RowEstimator
from lightning_rl.arguments import check_choices
from lightning_rl.signal.masked import GlobalSum, local_sum, masked_fill_invalid
from lightning_rl.signal.statistics import group_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class GPG(RowEstimator):
    r"""The score minus the mean of its group, :math:`\alpha (s - \bar s)` with :math:`\alpha = B / (B - M)`.

    .. math::
        A_i = \frac{B}{B - M}\,(s_i - \bar s)

    Of the B rewarded rows of the batch, M teach nothing: their groups have no two different scores. Without the scale
    they would thin the gradient out, the more the easier or harder the prompts are. Helps with mixed prompts, where
    dynamic sampling does not replace such groups; with the plain policy gradient as its loss.

    Source: Chu et al. 2025 (GPG), arXiv:2504.02546, accurate gradient estimation.

    Args:
        teaches: which rows count as teaching: those in groups of ``"different"`` scores, as in the paper, or those with
            a score that is not 0, ``"nonzero"``, as verl counts them.

    Raises:
        ValueError: if ``teaches`` is none of the two.
    """

    teaches: Literal["different", "nonzero"] = "different"
    shift_invariant: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the option, and declares what it makes of it."""
        check_choices(("different", "nonzero"), teaches=self.teaches)
        object.__setattr__(self, "shift_invariant", self.teaches == "different")

    @override
    def per_row(
        self, scores: Tensor, groups: Tensor, rewarded: Tensor, global_sum: GlobalSum = local_sum
    ) -> Float[Tensor, " B"]:
        group = group_statistics(scores, groups, rewarded)
        exact = masked_fill_invalid(scores, rewarded).double()
        teaching = group.spread if self.teaches == "different" else exact != 0
        rows, number = global_sum(torch.stack([rewarded.sum(), teaching.sum()]).double())
        scale = rows / number.clamp(min=1)
        return torch.where(group.spread, scale * (exact - group.mean), 0.0).to(scores.dtype)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        per_row = self.per_row(signal.scores, signal.groups, signal.rewarded, signal.global_sum)
        return Advantages(signal.spread_out(per_row))
