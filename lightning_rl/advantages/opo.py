"""OPO: score minus a length-weighted group mean."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.signal.masked import group_index, masked_fill_invalid
from lightning_rl.signal.statistics import group_statistics


@dataclass(frozen=True, slots=True)
class OPO(Estimator):
    r"""Score minus the length-weighted mean of its group, :math:`s - \sum_i l_i s_i / \sum_i l_i`.

    .. math::
        A_i = s_i - \frac{\sum_j l_j s_j}{\sum_j l_j}

    Rows outside ``rewarded`` and rows in groups of equal scores get 0. Lengths count valid tokens.

    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.
    """

    within_groups = True
    shift_invariant = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        scores, rewarded = signal.scores, signal.rewarded
        index, number = group_index(signal.groups)
        weights = torch.where(rewarded, signal.valid_tokens.sum(-1), 0).double()
        exact = masked_fill_invalid(scores, rewarded).double()
        zeros = torch.zeros(number, dtype=torch.float64, device=scores.device)
        baseline = zeros.index_add(0, index, weights * exact) / zeros.index_add(0, index, weights).clamp(min=1)
        spread = group_statistics(scores, signal.groups, rewarded).spread
        per_row = torch.where(spread, exact - baseline[index], 0.0).to(scores.dtype)
        return Advantages(signal.spread_out(per_row))
