r"""Outlier mask: mask a response if the ratio of trainer to engine is extreme at any of its tokens (token veto).

.. math::
    \text{keep } b \iff \alpha \le \min_t \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}
    \ \text{and}\ \max_t \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})} \le \beta

with :math:`\pi_{\text{old}}` the trainer's policy before the update, over the valid tokens. Masked responses still
count in the denominator.

Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

import math

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.importance_ratios import check_band, policy_ratio, within_band


class OutlierMask(RLCallback):
    """Mask on responses with an outlier token.

    Logs the fraction of outlier tokens as ``outlier_mask/tokens``, ``outlier_mask/ratio_max`` before masking, and
    ``outlier_mask/rejected``.

    Args:
        low: Smallest ratio that is not an outlier, in [0, 1].
        high: Largest ratio that is not an outlier, at least 1; infinite for no bound.

    Raises:
        ValueError: If a bound is out of range.
    """

    name = "outlier_mask"
    reads_at_loss = ("old_logprobs", "rollout_logprobs")

    def __init__(self, low: float = 1e-4, high: float = math.inf) -> None:
        check_band(low, high)
        self.low = low
        self.high = high

    @override
    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        return ~(self._outlier(view) & view.valid_tokens).any(-1)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = Stat.of(self._ratio(view), view.valid_tokens)
        tokens = Stat.of(self._outlier(view), view.valid_tokens)
        return {"outlier_mask/tokens": tokens, "outlier_mask/ratio_max": ratio.maximum()}

    def _outlier(self, view: LossView) -> Tensor:
        gap = view.require("old_logprobs") - view.require("rollout_logprobs")
        return ~within_band(gap, self.low, self.high) & ~gap.isnan()

    def _ratio(self, view: LossView) -> Tensor:
        return policy_ratio(view.require("old_logprobs"), view.require("rollout_logprobs"))
