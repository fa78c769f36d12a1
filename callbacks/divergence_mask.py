r"""Divergence mask: mask tokens or responses whose divergence between engine and trainer is too large.

.. math::
    \text{keep } (b, t) \iff D_{b,t} \le \beta
    \qquad\text{or}\qquad
    \text{keep } b \iff \operatorname*{mean, sum\ or\ max}_t D_{b,t} \le \beta

with :math:`D` between the trainer's policy before the update and the engine's, over the valid tokens. ``binary_kl`` is
the KL between Bernoulli distributions ("this token" or "another"), the larger of both directions. Unlike a ratio, it
ignores a change of probability from 0.001 to 0.01 and detects one from 0.99 to 0.60. ``k2`` and ``k3`` estimate the KL
of the policies from the sampled token. Masked tokens still count in the denominator and kept tokens have weight 1; add
:class:`~lightning_rl.callbacks.TruncatedIS` for importance weights.

Source: binary KL of tokens: Guo et al. 2026 (KPop), "Taming training-inference mismatch in reinforcement learning with
adaptive masking regions"; largest of a response: Li et al. 2025 (Trust region masking), arXiv:2512.23075.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.kl import binary_kl, k2, k3
from lightning_rl.signal.masked import masked_fill_invalid, row_mean
from lightning_rl.utils.arguments import check_choices, check_numbers


def _larger_binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(binary_kl(logprobs, other), binary_kl(other, logprobs))


DIVERGENCES = {"binary_kl": _larger_binary_kl, "k2": k2, "k3": k3}
LEVELS = ("token", "mean", "sum", "max")


class DivergenceMask(RLCallback):
    """Mask on tokens or responses with a large divergence.

    Logs ``divergence_mask/divergence`` and ``divergence_mask/divergence_max`` of the tokens before masking, and
    ``divergence_mask/rejected_tokens`` or ``divergence_mask/rejected``.

    Args:
        bound: Largest divergence that is kept, at least 0, in nats.
        divergence: ``"binary_kl"``, or ``"k2"`` or ``"k3"`` for an estimate of KL(rollout || old).
        level: ``"token"`` masks tokens; ``"mean"``, ``"sum"`` or ``"max"`` masks responses by that statistic of their
            tokens.

    Raises:
        ValueError: If the bound is negative, or the divergence or the level is unknown.
    """

    name = "divergence_mask"
    reads_at_loss = ("old_logprobs", "rollout_logprobs")

    def __init__(
        self,
        bound: float,
        *,
        divergence: Literal["binary_kl", "k2", "k3"] = "binary_kl",
        level: Literal["token", "mean", "sum", "max"] = "token",
    ) -> None:
        check_numbers(at_least=0, bound=bound)
        check_choices(DIVERGENCES, divergence=divergence)
        check_choices(LEVELS, level=level)
        self.bound = bound
        self.divergence = divergence
        self.level = level

    @property
    def token_wise(self) -> bool:  # pyrefly: ignore[bad-override]
        """True at the level of tokens."""
        return self.level == "token"

    @property
    @override
    def contributes(self) -> frozenset[str]:
        """Methods that the class overrides, with either ``token_mask`` or ``sequence_mask``."""
        return super().contributes - {"sequence_mask" if self.level == "token" else "token_mask"}

    @override
    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        return self._divergence(view) <= self.bound

    @override
    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        divergence = masked_fill_invalid(self._divergence(view), view.valid_tokens)
        if self.level == "max":
            return (divergence <= self.bound).all(-1)
        row = row_mean(divergence, view.valid_tokens) if self.level == "mean" else divergence.sum(-1)
        return row <= self.bound

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = Stat.of(self._divergence(view), view.valid_tokens)
        return {"divergence_mask/divergence": raw, "divergence_mask/divergence_max": raw.maximum()}

    def _divergence(self, view: LossView) -> Float[Tensor, "B T"]:
        return DIVERGENCES[self.divergence](view.require("rollout_logprobs"), view.require("old_logprobs"))
