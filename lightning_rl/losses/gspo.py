"""GSPO: clipped surrogate with one importance ratio per response."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView
from lightning_rl.losses.clipped_surrogate import ClippedSurrogate
from lightning_rl.signal.importance_ratios import policy_ratio, sequence_log_ratio
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.utils.arguments import check_bools, check_choices


@dataclass(frozen=True, kw_only=True)
class GSPO(ClippedSurrogate):
    r"""Clipped surrogate with one ratio per response, the geometric mean over its tokens.

    .. math:: s_b = \exp\Bigl(\frac{1}{|o_b|} \sum_t \log \frac{\pi_\theta(o_{b,t})}{\pi_{\text{old}}(o_{b,t})}\Bigr)

    With equal advantages along a row, ``per_token`` changes neither value nor reduced gradient. The reduction
    ``SequenceSumNorm(1)`` instead of ``sequence_mean`` weights each response by its length, which gives LUSPO. With
    ``anchor="rollout"``, one ratio corrects for the update and for the mismatch of engine and trainer. Logs the metrics
    of ClippedSurrogate.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 5 and 7; the form per token: eq. 13 and 14; LUSPO: Liu et
    al. 2026, arXiv:2602.05261; dual clip: Ye et al. 2020, arXiv:1912.09729.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1, at least 0.
        dual_clip: Upper bound on the ratio of responses with negative advantage, above 1; None for no bound.
        per_token: Use the gradient of each token, :math:`\operatorname{sg}[s_b]\, p_t / \operatorname{sg}[p_t]`, for
            advantages that differ along a row.
        anchor: Denominator of the ratio: ``"old"``, the policy before the update, or ``"rollout"``, the engine's, which
            needs bounds wider than the mismatch of engine and trainer.

    Raises:
        ValueError: If a distance is out of range, the two are bounds such as 0.8 and 1.2, or the anchor is unknown.
    """

    per_response: ClassVar[bool] = True
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    per_token: bool = False
    anchor: Literal["old", "rollout"] = "old"

    def __post_init__(self) -> None:
        """Check the options and set ``ratio`` and ``reads``."""
        super().__post_init__()
        check_bools(per_token=self.per_token)
        check_choices(("old", "rollout"), anchor=self.anchor)
        object.__setattr__(self, "ratio", ("current", self.anchor))
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    @override
    def importance(self, view: LossView) -> Float[Tensor, "B T"]:
        anchor, valid = view.require(f"{self.anchor}_logprobs"), view.valid_tokens
        log_ratio = sequence_log_ratio(view.logprobs, anchor, valid, geometric=True)[:, None]
        if self.per_token:
            logprobs = masked_fill_invalid(view.logprobs, valid)
            log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
        log_ratio = log_ratio.expand_as(view.logprobs)
        return policy_ratio(log_ratio, torch.zeros_like(log_ratio), bound=self.log_ratio_bound)
