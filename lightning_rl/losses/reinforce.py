"""Reinforce: policy gradient without an importance ratio."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView
from lightning_rl.losses.policy_loss import PolicyLoss


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    r"""Score-function loss :math:`-A \log p` without a ratio, exact for samples of the current policy.

    .. math::
        \ell = -A \log p

    Source: Williams 1992.
    """

    token_wise: ClassVar[bool] = True

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return -view.require("advantages") * view.logprobs
