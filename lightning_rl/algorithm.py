"""Algorithm: everything that turns a rollout into advantages, a loss and its gradient, as one value."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.advantages import Estimator
from lightning_rl.corrections import Corrections, LossView, Stat
from lightning_rl.corrections.stat import disjoint
from lightning_rl.edits import EditWatch, GradientSeal, refuse_grad_mode
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.signal.kl import k1, k3
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.ratios import policy_ratio
from lightning_rl.signal.reductions import Reduction

WeightsOf = Callable[[Reduction], Tensor]
"""The weight of each token of a microbatch under a reduction of the whole optimizer step, shape [b, T]."""

NEW_TENSOR = "a loss returns a new tensor"


class LossParts(NamedTuple):
    """The loss of a microbatch.

    Attributes:
        total: what is differentiated: this microbatch's share of the step's loss.
        parts: this microbatch's share of each logged part, by metric name, detached; terms without their coefficients.
        stats: statistics of the microbatch.
        gradients: of the view that it was made of, on which nothing hangs; None if nobody keeps them.
    """

    total: Float[Tensor, ""]
    parts: dict[str, Tensor]
    stats: dict[str, Stat]
    gradients: GradientSeal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What bends the signal: the same value trains, is audited, recorded, replayed and tested.

    The loss is the policy loss, the loss terms of the corrections and the value loss, as a sum over microbatches that
    does not depend on how an optimizer step is cut.

    Args:
        loss: of the policy; masks and weights of corrections multiply it and nothing else.
        advantages: from rewards to the advantage of each token.
        reduction: how tokens are weighed.
        corrections: the callbacks that contribute.
        value_loss: what the critic minimizes at each token, with its coefficient.
    """

    loss: PolicyLoss
    advantages: Estimator
    reduction: Reduction
    corrections: Corrections = field(default_factory=Corrections)
    value_loss: ValueLoss = field(default_factory=ValueLoss)

    def replace(self, **changes: Any) -> "Algorithm":
        """A copy with other parts."""
        return replace(self, **changes)

    @property
    def trains_entropy(self) -> bool:
        """Whether something trains the entropy, so that the view has to carry its gradient."""
        return any(callback.trains_entropy for callback in self.corrections.callbacks)

    def microbatch_loss(self, view: LossView, weights_of: WeightsOf) -> LossParts:
        """The loss of one microbatch and everything worth knowing about it."""
        view = view.sanitize()
        with self.corrections.watching(view) as watch:
            return self._watched_loss(view, weights_of, watch)

    def _watched_loss(self, view: LossView, weights_of: WeightsOf, watch: EditWatch) -> LossParts:
        """The same of a sanitized view, whose fields are compared after everyone who is shown it."""
        valid, weights = view.valid_tokens, weights_of(self.reduction)
        factor, stats = self.corrections.policy_factor(view)
        raw = _checked_loss(f"loss {self.loss.name}", view, partial(self.loss, view), watch)
        parts = {"loss/policy": _reduce(raw if factor is None else _times(raw, factor, valid), weights, valid)}
        total = parts["loss/policy"]
        for name, term in self.corrections.loss_terms(view):
            per_token = term.per_token
            if term.masked and factor is not None:
                per_token = _times(per_token, factor, valid)
            term_weights = weights if term.reduction is None else weights_of(term.reduction)
            parts[f"{name}/loss"] = _reduce(per_token, term_weights, valid)
            total = total + term.coef * parts[f"{name}/loss"]
        if view.current_values is not None and view.values is not None and view.returns is not None:
            per_token = partial(self.value_loss, view.current_values, view.values, view.returns)
            error = _checked_loss(f"value loss {type(self.value_loss).__name__}", view, per_token, watch)
            parts["loss/value"] = _reduce(error, weights, valid)
            total = total + self.value_loss.coef * parts["loss/value"]
        parts = {"loss/total": total, **parts}
        detached = {name: part.detach() for name, part in parts.items()}
        with torch.no_grad():
            ours, by_loss = policy_metrics(view), self.loss.metrics(view)
            if type(self.loss).metrics is not PolicyLoss.metrics:
                watch.after(f"metrics of the loss {self.loss.name}", NEW_TENSOR)
            measured = ours, by_loss, self.corrections.metrics(view)
        return LossParts(total, detached, disjoint(stats, *measured), watch.gradients)


def policy_metrics(view: LossView) -> dict[str, Stat]:
    """What the core measures of every microbatch, from untouched inputs and before any clip.

    ``kl/ref`` is k1; ``kl/old`` and ``kl/rollout`` are exp(d) - 1 - d with d = current - other, unbiased for the KL of
    the policy that sampled to the current one. Each is logged whenever its field exists.
    """
    logprobs, valid = view.logprobs.detach(), view.valid_tokens
    values = {"policy/entropy": view.entropy}
    if view.old_logprobs is not None:
        values["policy/ratio_max"] = policy_ratio(logprobs, view.old_logprobs)
        values["kl/old"] = k3(view.old_logprobs, logprobs)
    if view.rollout_logprobs is not None:
        values["kl/rollout"] = k3(view.rollout_logprobs, logprobs)
    if view.ref_logprobs is not None:
        values["kl/ref"] = k1(logprobs, view.ref_logprobs)
    if view.current_values is not None and view.returns is not None:
        values["value/error"] = (view.current_values - view.returns).abs()
    stats = Stat.many(values, valid)
    if "policy/ratio_max" in stats:
        ratio = stats["policy/ratio_max"]
        stats |= {"policy/ratio_max": ratio.maximum(), "policy/ess": ratio.ess()}
    return stats


def _checked_loss(what: str, view: LossView, loss: Callable[[], Tensor], watch: EditWatch) -> Tensor:
    """What a loss returns, which is a value per token and was made without writing to the view."""
    enabled = torch.is_grad_enabled()
    raw = loss()
    refuse_grad_mode(f"the {what}", enabled=enabled)
    watch.after(f"the {what}", NEW_TENSOR)
    if not isinstance(raw, Tensor) or raw.shape != view.valid_tokens.shape:
        expected, got = list(view.valid_tokens.shape), list(raw.shape) if isinstance(raw, Tensor) else repr(raw)
        raise ValueError(f"expected the {what} to return a value per token {expected}, got {got}")
    return raw


def _times(per_token: Tensor, factor: Tensor, valid: Tensor) -> Tensor:
    kept = masked_fill_invalid(factor, valid)
    return torch.where(kept != 0, per_token, 0.0) * kept  # what is rejected may be infinite


def _reduce(per_token: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    return (masked_fill_invalid(per_token, valid) * weights).sum()
