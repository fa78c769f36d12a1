"""From a case to a LossView, and the real objective on it."""

from collections.abc import Sequence
from typing import Any

import torch
from kit.support import run_step, view_of
from torch import Tensor

from goldens.cases import Case, Outputs
from lightning_rl import LossView, PolicyLoss, RLCallback
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction

FIELDS = {"old_logprobs": "old_logp", "rollout_logprobs": "rollout_logp", "ref_logprobs": "ref_logp"}
ADVANTAGES = ("adv", "advantages")


def view_of_case(case: Case, **given: Tensor) -> LossView:
    """The inputs of a case as a view; ``logp`` carries the gradient. Keywords replace or add fields."""
    logprobs = given.pop("logprobs", None)
    if logprobs is None:
        logprobs = case["logp" if "logp" in case else "old_logp"]
    fields: dict[str, Any] = {ours: case[theirs] for ours, theirs in FIELDS.items() if theirs in case}
    for name in ADVANTAGES:
        if name in case:
            fields["advantages"] = rows_to_tokens(case[name], logprobs)
    valid = given.pop("valid", case.mask() if "mask" in case else None)
    trained = given.pop("trained", None)
    view = view_of(logprobs, valid=valid, dtype=logprobs.dtype, **dict[str, Any](fields, **given))
    return view if trained is None else view.replace(trained=trained)


def rows_to_tokens(values: Tensor, like: Tensor) -> Tensor:
    """One number for each row, or each token, at every token."""
    if values.dim() < like.dim():
        values = values[:, None]
    return values.expand_as(like).to(like.dtype)


def objective(
    view: LossView,
    loss: PolicyLoss,
    reduction: Reduction,
    *,
    callbacks: Sequence[RLCallback] = (),
    scale: float = 1.0,
    **options: Any,
) -> Outputs:
    """Loss and gradient of the real objective; ``scale`` turns a mean into the peer's sum."""
    step = run_step(view, callbacks=callbacks, loss=loss, reduction=reduction, **options)
    return {"loss": step.loss * scale, "grad_logp": step.gradient * scale}


def reduced(view: LossView, per_token: Tensor, reduction: Reduction) -> Tensor:
    """A loss per token as one number."""
    weights = reduction(view.valid_tokens, view.trained, view.groups, local_sum)
    return (torch.where(view.valid_tokens, per_token, 0.0) * weights).sum()


def gradient(scalar: Tensor, of: Tensor) -> Tensor:
    """The gradient of a number; zeros where nothing depends on it."""
    (found,) = torch.autograd.grad(scalar, of, allow_unused=True)
    return torch.zeros_like(of) if found is None else found
