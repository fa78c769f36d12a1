"""What the geometric and the product mask share: bounds on the importance ratio of a whole response."""

from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.corrections import check_band
from lightning_rl.signal.ratios import sequence_ratio


class SequenceRatioMask(RLCallback):
    """Keeps responses whose ratio of old to rollout policy lies within bounds, both included.

    Args:
        low: smallest ratio that is kept, in [0, 1].
        high: largest ratio that is kept, at least 1.

    Raises:
        ValueError: if a bound is out of range.
    """

    geometric: ClassVar[bool]
    reads_at_loss = ("old_logprobs", "rollout_logprobs")

    def __init__(self, low: float, high: float) -> None:
        check_band(low, high)
        self.low = low
        self.high = high

    @override
    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        ratio = self._ratio(view)
        return (ratio >= self.low) & (ratio <= self.high)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = Stat.of(self._ratio(view), view.trained)
        return {f"{type(self).name}/ratio": raw, f"{type(self).name}/ratio_max": raw.maximum()}

    def _ratio(self, view: LossView) -> Tensor:
        old, rollout = view.required("old_logprobs"), view.required("rollout_logprobs")
        return sequence_ratio(old, rollout, view.valid_tokens, geometric=self.geometric)
