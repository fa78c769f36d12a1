r"""Divergence mask: leave out what engine and trainer see too differently, by a divergence instead of a ratio.

.. math::
    \text{keep } (b, t) \iff D_{b,t} \le \beta
    \qquad\text{or}\qquad
    \text{keep } b \iff \operatorname*{mean, sum\ or\ max}_t D_{b,t} \le \beta

with :math:`D` between the trainer's policy before the update and the engine's, over the valid tokens. A ratio calls a
token mismatched when its probability goes from 0.001 to 0.01 and lets it pass when it goes from 0.99 to 0.60; the KL of
the two coins "this token" or "another", the larger of both directions, does the opposite, and so does no harm to rare
tokens. k2 and k3 estimate the KL of the policies from the token alone. What is left out still counts in the
denominator, and what is kept keeps weight 1; add :class:`~lightning_rl.callbacks.TruncatedIS` to weigh it as well.

Source: binary KL of tokens: Guo et al. 2026 (KPop), "Taming training-inference mismatch in reinforcement learning with
adaptive masking regions"; largest of a response: Li et al. 2025 (Trust region masking), arXiv:2512.23075.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices, check_numbers
from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.kl import binary_kl, k2, k3
from lightning_rl.signal.masked import masked_fill_invalid, row_mean


def _both_ways(logprobs: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(binary_kl(logprobs, other), binary_kl(other, logprobs))


DIVERGENCES = {"binary_kl": _both_ways, "k2": k2, "k3": k3}
LEVELS = ("token", "mean", "sum", "max")


class DivergenceMask(RLCallback):
    """Masks tokens or responses by their divergence.

    Logs ``divergence_mask/divergence`` and ``divergence_mask/divergence_max`` of single tokens before the mask, and the
    core's ``divergence_mask/rejected_tokens`` or ``divergence_mask/rejected``.

    Args:
        bound: largest divergence that is kept, at least 0, in nats.
        divergence: ``"binary_kl"``, or ``"k2"`` or ``"k3"`` for an estimate of KL(rollout || old).
        level: ``"token"``, or what decides for a whole response: the ``"mean"``, ``"sum"`` or ``"max"`` of its tokens.

    Raises:
        ValueError: if the bound is negative, or the divergence or the level unknown.
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
    @override
    def contributes(self) -> frozenset[str]:
        """Either a mask of tokens or one of responses, and what the class overrides besides."""
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
