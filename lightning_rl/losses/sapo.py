"""SAPO: surrogate with a soft gate on the ratio instead of a clip."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView
from lightning_rl.losses.policy_loss import RatioLoss
from lightning_rl.utils.arguments import check_numbers


@dataclass(frozen=True, kw_only=True)
class SAPO(RatioLoss):
    r"""Surrogate with a soft gate on the ratio: :math:`-\tfrac{4}{\tau}\,\sigma(\tau (r - 1))\, A`.

    .. math::
        \ell = -\frac{4}{\tau}\,\sigma\bigl(\tau (r - 1)\bigr)\, A, \qquad
        \tau = \tau_{positive}\ \text{if}\ A > 0\ \text{else}\ \tau_{negative}

    At a ratio of 1 its gradient is that of :math:`-rA`; it decays away from 1.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347, eq. 6.

    Args:
        tau_positive: Temperature for positive advantages, above 0.
        tau_negative: Temperature for the other advantages, above 0; a larger value decays their gradient faster.

    Raises:
        ValueError: If a temperature is not positive.
    """

    token_wise: ClassVar[bool] = True
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        """Check the options."""
        check_numbers(above=0, finite=True, tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        advantages = view.require("advantages")
        tau = torch.where(advantages > 0, torch.full_like(advantages, self.tau_positive), self.tau_negative)
        gate = torch.sigmoid(tau * (self.importance(view) - 1))
        return -4 / tau * gate * advantages
