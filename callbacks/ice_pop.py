r"""IcePop: mask tokens whose probability differs too much between engine and trainer, in either direction.

.. math::
    \text{keep } (b, t) \iff \alpha \le \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})} \le \beta

with :math:`\pi_{\text{old}}` the trainer's policy before the update. Masked tokens still count in the denominator. Kept
tokens have weight 1; add :class:`~lightning_rl.callbacks.TruncatedIS` for importance weights.

Source: Ling team 2025 (Every Step Evolves), arXiv:2510.18855.
"""

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.importance_ratios import check_band, policy_ratio, within_band


class IcePop(RLCallback):
    """Mask on tokens whose importance ratio is out of bounds.

    Logs ``ice_pop/ratio`` and ``ice_pop/ratio_max`` before masking, and ``ice_pop/rejected_tokens``.

    Args:
        low: Smallest ratio that is kept, in [0, 1].
        high: Largest ratio that is kept, at least 1.

    Raises:
        ValueError: If a bound is out of range.
    """

    name = "ice_pop"
    token_wise = True
    reads_at_loss = ("old_logprobs", "rollout_logprobs")

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        check_band(low, high)
        self.low = low
        self.high = high

    @override
    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        gap = view.require("old_logprobs") - view.require("rollout_logprobs")
        return within_band(gap, self.low, self.high)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = Stat.of(self._ratio(view), view.valid_tokens)
        return {"ice_pop/ratio": raw, "ice_pop/ratio_max": raw.maximum()}

    def _ratio(self, view: LossView) -> Tensor:
        return policy_ratio(view.require("old_logprobs"), view.require("rollout_logprobs"))
