"""M2PO: clipped surrogate without the tokens of largest mismatch between engine and trainer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.clipped_surrogate import ClippedSurrogate
from lightning_rl.losses.policy_loss import prepared_tokens
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat, smallest_with_mean_below
from lightning_rl.utils.arguments import check_numbers


@dataclass(frozen=True, kw_only=True)
class M2PO(ClippedSurrogate):
    r"""Clipped surrogate on the tokens that keep the second moment of the log-ratio to the engine small.

    .. math::
        \ell = \ell_{\text{clip}}\,[(b, t) \in \mathcal{K}], \qquad
        \frac{1}{|\mathcal{K}|} \sum_{(b, t) \in \mathcal{K}} \Bigl(\log
        \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}\Bigr)^2 \le \tau

    The tokens with the largest squared log-ratio of old to rollout policy are masked until the mean over the rest is
    below the threshold; they stay in the denominator. Logs the fraction of kept tokens as ``policy/kept``.

    Source: Zheng et al. 2025, arXiv:2510.01161.

    Args:
        threshold: Bound of the mean squared log-ratio, above 0.

    Raises:
        ValueError: If an option is out of range.
    """

    reads = ("old_logprobs", "rollout_logprobs")

    threshold: float = 0.04

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_numbers(above=0, threshold=self.threshold)

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        squares = [(view.require("old_logprobs") - view.require("rollout_logprobs")).square() for view in views]
        return smallest_with_mean_below(squares, [view.valid_tokens for view in views], self.threshold, global_concat)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return torch.where(prepared_tokens(view), super().__call__(view), 0.0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {**super().metrics(view), "policy/kept": Stat.of(prepared_tokens(view), view.valid_tokens)}
