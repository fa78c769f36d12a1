"""GPG: centered rewards, divided by the fraction of rows with a nonzero advantage."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, RewardSignal, RowEstimator
from lightning_rl.signal.masked import GlobalSum, local_sum, masked_fill_invalid
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class GPG(RowEstimator):
    r"""Score minus the mean of its group, scaled: :math:`\alpha (s - \bar s)` with :math:`\alpha = B / (B - M)`.

    .. math::
        A_i = \frac{B}{B - M}\,(s_i - \bar s)

    Of the B rewarded rows of the batch, M are in groups of equal scores and have no advantage. The scale compensates
    for them. Helps with prompts of mixed difficulty if dynamic sampling does not replace such groups; meant for the
    plain policy gradient.

    Source: Chu et al. 2025 (GPG), arXiv:2504.02546, accurate gradient estimation.

    Args:
        teaches: Rows that are counted as B - M: ``"different"``, rows in groups of different scores, as in the paper,
            or ``"nonzero"``, rows with a nonzero score, as in verl.

    Raises:
        ValueError: If ``teaches`` is neither of the two.
    """

    teaches: Literal["different", "nonzero"] = "different"
    shift_invariant: bool = field(init=False, repr=False, compare=False)  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the option and set ``shift_invariant``."""
        check_choices(("different", "nonzero"), teaches=self.teaches)
        object.__setattr__(self, "shift_invariant", self.teaches == "different")

    @override
    def per_row(
        self, scores: Tensor, groups: Tensor, rewarded: Tensor, global_sum: GlobalSum = local_sum
    ) -> Float[Tensor, " B"]:
        group = group_statistics(scores, groups, rewarded)
        exact = masked_fill_invalid(scores, rewarded).double()
        counted = group.spread if self.teaches == "different" else exact != 0
        rows, number = global_sum(torch.stack([rewarded.sum(), counted.sum()]).double())
        scale = rows / number.clamp(min=1)
        return torch.where(group.spread, scale * (exact - group.mean), 0.0).to(scores.dtype)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        per_row = self.per_row(signal.scores, signal.groups, signal.rewarded, signal.global_sum)
        return Advantages(signal.spread_out(per_row))
