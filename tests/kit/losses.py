"""Losses on plain tensors, and with another bound of the log-ratio."""

from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

from kit.support import view_of
from lightning_rl.losses import PolicyLoss
from lightning_rl.losses.policy_loss import RatioLoss

RatioLossT = TypeVar("RatioLossT", bound=RatioLoss)


def loss_of(
    loss: PolicyLoss, logprobs: Tensor, anchor: Tensor, advantages: Tensor, valid: Tensor | None = None
) -> Tensor:
    """The loss of each token; ``anchor`` is the policy before the update and that of the engine."""
    policies: dict[str, Any] = {"old_logprobs": anchor, "rollout_logprobs": anchor, "advantages": advantages}
    view = view_of(logprobs.detach(), dtype=logprobs.dtype, valid=valid, **policies)
    return loss(view.replace(logprobs=logprobs))


def with_bound(loss: RatioLossT, bound: float) -> RatioLossT:
    """The same loss with another ``log_ratio_bound``."""
    kind: Any = type(type(loss).__name__, (type(loss),), {"log_ratio_bound": bound})
    return kind(**{spec.name: getattr(loss, spec.name) for spec in fields(kind)})
