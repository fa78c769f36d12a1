r"""Sequence-ratio mask: mask responses whose probability differs too much between engine and trainer.

.. math::
    \text{keep } b \iff \alpha \le \exp\Bigl(\frac{1}{|o_b|} \sum_t
    \log \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}\Bigr) \le \beta
    \qquad\text{or}\qquad
    \alpha \le \prod_t \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})} \le \beta
    \qquad\text{or}\qquad
    \alpha \le \max_t \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})} \le \beta

with :math:`\pi_{\text{old}}` the trainer's policy before the update, over the valid tokens. Masked responses still
count in the denominator. The product grows with the length of the response; the geometric mean does not; the maximum
detects single tokens. Add :class:`~lightning_rl.callbacks.TruncatedIS` for importance weights:
``SequenceRatioMask("product")`` with ``TruncatedIS("sequence", cap=math.inf)`` is IcePop at the level of responses.

Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.importance_ratios import check_band, policy_ratio, sequence_log_ratio, within_band
from lightning_rl.utils.arguments import check_choices

BANDS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0), "max": (0.0, 5.0)}


class SequenceRatioMask(RLCallback):
    """Mask on responses whose ratio of old to rollout policy is out of bounds.

    Logs ``sequence_ratio_mask/ratio`` and ``sequence_ratio_mask/ratio_max`` before masking, and
    ``sequence_ratio_mask/rejected``.

    Args:
        statistic: Ratio of a response: the ``"geometric"`` mean, the ``"product"`` or the ``"max"`` over its tokens.
        low: Smallest ratio that is kept, in [0, 1]; by default 0.99 for the mean, 0.5 for the product and 0 for the
            maximum.
        high: Largest ratio that is kept, at least 1; by default 1.01 for the mean, 2 for the product and 5 for the
            maximum.

    Raises:
        ValueError: If the statistic is unknown or a bound is out of range.
    """

    name = "sequence_ratio_mask"
    reads_at_loss = ("old_logprobs", "rollout_logprobs")

    def __init__(
        self, statistic: Literal["geometric", "product", "max"], low: float | None = None, high: float | None = None
    ) -> None:
        check_choices(BANDS, statistic=statistic)
        self.statistic = statistic
        self.low = BANDS[statistic][0] if low is None else low
        self.high = BANDS[statistic][1] if high is None else high
        check_band(self.low, self.high)

    @override
    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        return within_band(self._log_ratio(view), self.low, self.high)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        log_ratio = self._log_ratio(view)
        raw = Stat.of(policy_ratio(log_ratio, torch.zeros_like(log_ratio)), view.trained)
        return {"sequence_ratio_mask/ratio": raw, "sequence_ratio_mask/ratio_max": raw.maximum()}

    def _log_ratio(self, view: LossView) -> Float[Tensor, " B"]:
        old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
        if self.statistic == "max":
            largest = torch.where(view.valid_tokens, old - rollout, -torch.inf).amax(-1)
            return torch.where(view.valid_tokens.any(-1), largest, 0.0)
        return sequence_log_ratio(old, rollout, view.valid_tokens, geometric=self.statistic == "geometric")
