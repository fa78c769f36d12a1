"""GSPO: the clipped surrogate with one importance ratio for a whole response."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_bools
from lightning_rl.corrections import LossView
from lightning_rl.losses.clipped_surrogate import ClippedSurrogate
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.ratios import policy_ratio, sequence_log_ratio


@dataclass(frozen=True, kw_only=True)
class GSPO(ClippedSurrogate):
    r"""The clipped surrogate with one ratio for a whole response, the geometric mean of those of its tokens.

    .. math:: s_b = \exp\Bigl(\frac{1}{|o_b|} \sum_t \log \frac{\pi_\theta(o_{b,t})}{\pi_{\text{old}}(o_{b,t})}\Bigr)

    With equal advantages along a row, both forms have the same value and, reduced, the same gradient. Logs what
    ClippedSurrogate does, every token of a response counting with its ratio.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 and 7; the form per token: eq. 13 and 14.

    Args:
        clip_low: how far below 1 the ratio still has a gradient, in [0, 1].
        clip_high: how far above 1 it still has one, at least 0.
        per_token: give every token its own gradient, :math:`\operatorname{sg}[s_b]\, p_t / \operatorname{sg}[p_t]`, for
            advantages that differ along a row.

    Raises:
        ValueError: if a bound is out of range.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    per_token: bool = False

    def __post_init__(self) -> None:
        """Checks the bounds."""
        super().__post_init__()
        check_bools(per_token=self.per_token)

    @override
    def importance(self, view: LossView) -> Float[Tensor, "B T"]:
        old, valid = view.require("old_logprobs"), view.valid_tokens
        log_ratio = sequence_log_ratio(view.logprobs, old, valid, geometric=True)[:, None]
        if self.per_token:
            logprobs = masked_fill_invalid(view.logprobs, valid)
            log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
        log_ratio = log_ratio.expand_as(view.logprobs)
        return policy_ratio(log_ratio, torch.zeros_like(log_ratio), bound=self.log_ratio_bound)
