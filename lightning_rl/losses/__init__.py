"""Policy losses: small frozen objects, registered by name."""

from collections.abc import Callable

from torch import Tensor, nn

from lightning_rl.corrections import LossView
from lightning_rl.losses.cispo import CISPO
from lightning_rl.losses.clipped_surrogate import ClippedSurrogate
from lightning_rl.losses.cov import ClipCov, KLCov
from lightning_rl.losses.critic import Critic
from lightning_rl.losses.dppo import DPPO
from lightning_rl.losses.dro import DRO
from lightning_rl.losses.gmpo import GMPO
from lightning_rl.losses.gspo import GSPO
from lightning_rl.losses.m2po import M2PO
from lightning_rl.losses.policy_loss import FunctionLoss, PolicyLoss
from lightning_rl.losses.reinforce import Reinforce
from lightning_rl.losses.sapo import SAPO
from lightning_rl.losses.value import ValueLoss
from lightning_rl.losses.vespo import VESPO

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "LOSSES",
    "M2PO",
    "SAPO",
    "VESPO",
    "ClipCov",
    "ClippedSurrogate",
    "Critic",
    "FunctionLoss",
    "KLCov",
    "PolicyLoss",
    "Reinforce",
    "ValueLoss",
    "resolve_loss",
]

LOSSES: dict[str, PolicyLoss] = {
    "ppo": ClippedSurrogate(),
    "reinforce": Reinforce(),
    "gspo": GSPO(),
    "cispo": CISPO(),
    "dppo": DPPO(),
    "sapo": SAPO(),
    "gmpo": GMPO(),
    "clip_cov": ClipCov(),
    "kl_cov": KLCov(),
    "m2po": M2PO(),
    "vespo": VESPO(),
    "dro": DRO(),
}


def resolve_loss(loss: PolicyLoss | Callable[[LossView], Tensor] | str) -> PolicyLoss:
    """Return the loss for an object, a function or a registered name.

    Raises:
        ValueError: If the name is unknown, or for a class instead of an object.
    """
    if isinstance(loss, PolicyLoss):
        return loss
    if isinstance(loss, type):
        raise ValueError(f"expected an object as loss, got the class {loss.__name__}: call it")
    if isinstance(loss, nn.Module):
        raise ValueError(
            f"expected a loss out of {', '.join(LOSSES)}, or a function of a LossView that returns a loss per token, "
            f"got the module {type(loss).__name__}: pass a function"
        )
    if callable(loss):
        return FunctionLoss(loss)
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"expected a loss out of {', '.join(LOSSES)}, an object or a function, got {loss!r}")
    return LOSSES[loss]
