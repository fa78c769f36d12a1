"""DPPO: surrogate with a trust region on the probability of each token."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.policy_loss import RatioLoss
from lightning_rl.signal.importance_ratios import check_distances
from lightning_rl.signal.kl import binary_kl
from lightning_rl.utils.arguments import check_choices, check_numbers


@dataclass(frozen=True, kw_only=True)
class DPPO(RatioLoss):
    r"""Surrogate :math:`-\rho A`, masked where the token left a trust region in the direction of its advantage.

    .. math::
        \ell = -\rho A\,[\text{inside}], \qquad \rho = \frac{p}{q}, \qquad
        \text{outside} \iff (p > q,\ A > 0,\ D > D_{high})\ \text{or}\ (p < q,\ A \le 0,\ D > D_{low})

    :math:`D` is a divergence between Bernoulli distributions ("this token" or "another") of the policy being trained
    and the engine's: the total variation :math:`|p - q|` or the KL of q to p. Logs the fraction of masked tokens as
    ``policy/outside``.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 11 to 14.

    Args:
        divergence: ``"tv"`` or ``"kl"``.
        low: Bound for tokens that became less likely and have no positive advantage.
        high: Bound for tokens that became more likely and have a positive advantage.
        cap: None for :math:`-\rho A`; a number for the score-function form :math:`-\operatorname{sg}[\min(\rho, cap)] A
            \log p`, which has the same gradient below the cap.

    Raises:
        ValueError: If an option is out of range.
    """

    token_wise: ClassVar[bool] = True
    ratio = ("current", "rollout")
    reads = ("rollout_logprobs",)

    divergence: Literal["tv", "kl"] = "tv"
    low: float = 0.2
    high: float = 0.2
    cap: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choices(("tv", "kl"), divergence=self.divergence)
        check_distances(low=self.low, high=self.high)
        check_numbers(at_least=1, optional=True, cap=self.cap)

    def outside(self, view: LossView) -> Bool[Tensor, "B T"]:
        """Return the tokens outside of the trust region, which are masked."""
        advantages = view.require("advantages")
        current, rollout = view.logprobs.detach(), view.require("rollout_logprobs")
        now, then = current.exp(), rollout.exp()
        distance = binary_kl(rollout, current) if self.divergence == "kl" else (now - then).abs()
        grown = (now > then) & (distance > self.high) & (advantages > 0)
        shrunk = (now < then) & (distance > self.low) & (advantages <= 0)
        return grown | shrunk

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        ratio, advantages, inside = self.importance(view), view.require("advantages"), ~self.outside(view)
        if self.cap is None:
            return torch.where(inside, -ratio * advantages, 0.0)
        return torch.where(inside, -ratio.detach().clamp(max=self.cap) * advantages * view.logprobs, 0.0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"policy/outside": Stat.of(self.outside(view), view.valid_tokens)}
