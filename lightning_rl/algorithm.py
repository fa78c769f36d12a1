"""Algorithm: advantages, loss and corrections of a run in one object."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.advantages import Estimator
from lightning_rl.corrections import Corrections, LossView, Stat, outputs_from
from lightning_rl.corrections.rl_callback import CONTRIBUTIONS
from lightning_rl.corrections.stat import disjoint
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.rollout import EXPERT_LOAD, SUM_PI_SQUARED
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.kl import k1, k3
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.reductions import Reduction

WeightsOf = Callable[[Reduction], Tensor]
"""Function that returns the weights of a microbatch's tokens [b, T] by a reduction over the optimizer step."""


class LossParts(NamedTuple):
    """Loss of a microbatch: total 0.31 of parts {"policy": 0.3, "reference_kl": 0.2} with a coefficient of 0.05.

    Attributes:
        total: Part of the step's loss that this microbatch adds, with gradient.
        parts: Parts of ``total`` by metric name, detached and without coefficients.
        stats: Statistics of the microbatch.
        untrained: For each part without a gradient, True if it is not 0, shape [] bool.
    """

    total: Float[Tensor, ""]
    parts: dict[str, Tensor]
    stats: dict[str, Stat]
    untrained: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Algorithm of a run, shared by training, audit, recording, replay and tests.

    The loss is the sum of policy loss, loss terms of the corrections and value loss. Its sum over the microbatches of
    an optimizer step does not depend on how the step is split.

    Args:
        loss: Policy loss; masks and weights of corrections apply to it alone.
        advantages: Advantage estimator.
        reduction: Weights of tokens.
        corrections: Callbacks that change the training signal.
        value_loss: Loss of the critic, with its coefficient.
    """

    loss: PolicyLoss
    advantages: Estimator
    reduction: Reduction
    corrections: Corrections = field(default_factory=Corrections)
    value_loss: ValueLoss = field(default_factory=ValueLoss)

    def replace(self, **changes: Any) -> "Algorithm":
        """Return a copy with changed fields."""
        return replace(self, **changes)

    @property
    def trains_entropy(self) -> bool:
        """True if a correction needs the gradient of the entropy."""
        return any(callback.trains_entropy for callback in self.corrections.callbacks)

    @property
    def token_wise(self) -> bool:
        """True if no token's share of an optimizer step depends on other tokens, so that a row may be divided.

        Loss and corrections declare it: see ``token_wise`` of :class:`.PolicyLoss` and :class:`.RLCallback`.
        """
        methods = (name for name, entry in CONTRIBUTIONS.items() if entry.when == "update")
        parts = self.loss, *self.corrections.contributors(*methods)
        return (
            all("token_wise" in vars(type(part)) and part.token_wise for part in parts)
            and type(self.value_loss) is ValueLoss
        )

    def microbatch_loss(self, view: LossView, weights_of: WeightsOf) -> LossParts:
        """Return the loss of one microbatch, its parts and statistics."""
        view = view.sanitize()
        with torch.no_grad():
            measured = policy_metrics(view)  # before a correction or a loss sees the tensors
        valid, weights = view.valid_tokens, weights_of(self.reduction)
        factor, stats = self.corrections.policy_factor(view)
        raw = self._per_token(f"the loss {self.loss.name}", self.loss, view, seen=view)
        tokens = {"loss/policy": raw}
        parts = {"loss/policy": _reduce(raw if factor is None else _times(raw, factor, valid), weights, valid)}
        total = parts["loss/policy"]
        for name, term in self.corrections.loss_terms(view):
            per_token = term.per_token
            if term.masked and factor is not None:
                per_token = _times(per_token, factor, valid)
            term_weights = weights if term.reduction is None else weights_of(term.reduction)
            if term.follows_policy_loss:
                term_weights = _slopes(parts["loss/policy"], view.logprobs)
            tokens[f"{name}/loss"] = per_token
            parts[f"{name}/loss"] = _reduce(per_token, term_weights, valid)
            total = total + term.coef * parts[f"{name}/loss"]
        if view.current_values is not None and view.values is not None and view.returns is not None:
            who, values = f"the value loss {type(self.value_loss).__name__}", (view.current_values, view.values)
            error = self._per_token(who, self.value_loss, *values, view.returns, seen=view)
            tokens["loss/value"] = error
            parts["loss/value"] = _reduce(error, weights, valid)
            total = total + self.value_loss.coef * parts["loss/value"]
        parts = {"loss/total": total, **parts}
        detached = {name: part.detach() for name, part in parts.items()}
        with torch.no_grad():
            who = f"metrics of the loss {self.loss.name}"
            by_loss = self.corrections.call(who, self.loss.metrics, view, shown=view.tensors)
            metrics = by_loss, self.corrections.metrics(view)
        untrained = {
            name: masked_fill_invalid(one, valid).any() for name, one in tokens.items() if not parts[name].requires_grad
        }
        return LossParts(total, detached, disjoint(measured, stats, *metrics), untrained)

    def _per_token(self, who: str, loss: Callable[..., Tensor], *args: object, seen: LossView) -> Tensor:
        """Return the output of a loss; raise an error if it has another shape."""
        raw = self.corrections.call(who, loss, *args, shown=seen.tensors)
        if not isinstance(raw, Tensor) or raw.shape != seen.valid_tokens.shape:
            expected, got = list(seen.valid_tokens.shape), list(raw.shape) if isinstance(raw, Tensor) else repr(raw)
            raise ValueError(f"expected {who} to return a value per token {expected}, got {got}")
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Optional fields that are read, so the passes that have to run.

    Attributes:
        rollout_logprobs: Log-probabilities of the engine, in every rollout.
        old_logprobs: Log-probabilities of the policy before the first step, by a pass.
        rollout_as_old: They are those of the rollout, bit for bit, so that no pass is needed.
        ref_logprobs: Log-probabilities of the reference.
        sum_pi_squared: Sum of the squared probabilities of the vocabulary.
        expert_load: Share of tokens of each expert in each optimizer step.
    """

    rollout_logprobs: bool = False
    old_logprobs: bool = False
    rollout_as_old: bool = False
    ref_logprobs: bool = False
    sum_pi_squared: bool = False
    expert_load: bool = False


def needs(algorithm: Algorithm, *, steps_per_rollout: int, rollout_as_old: bool = False) -> Needs:
    """Return the passes over a rollout that have to run."""
    callbacks, estimated = algorithm.corrections.callbacks, set(algorithm.advantages.reads)
    early = estimated.union(*(callback.reads for callback in callbacks))
    read = early.union(algorithm.loss.reads, *(callback.reads_at_loss for callback in callbacks))
    return Needs(
        rollout_logprobs=rollout_as_old or "rollout_logprobs" in read,
        old_logprobs=not rollout_as_old and (steps_per_rollout > 1 or "old_logprobs" in early),
        rollout_as_old=rollout_as_old,
        ref_logprobs="ref_logprobs" in read,
        sum_pi_squared=f"token_extras/{SUM_PI_SQUARED}" in early,
        expert_load=bool(outputs_from(EXPERT_LOAD) & read),
    )


def policy_metrics(view: LossView) -> dict[str, Stat]:
    """Return the metrics of a microbatch that every run logs, before any clipping.

    ``kl/ref`` is k1. ``kl/old`` and ``kl/rollout`` are exp(d) - 1 - d with d = log(current) - log(other). Both estimate
    KL(sampling policy, current policy) without bias. A metric is left out if its field is None.
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


def _times(per_token: Tensor, factor: Tensor, valid: Tensor) -> Tensor:
    kept = masked_fill_invalid(factor, valid)
    return torch.where(kept != 0, per_token, 0.0) * kept  # masked tokens may hold inf, and 0 * inf is NaN


def _slopes(loss: Tensor, logprobs: Tensor) -> Tensor:
    """Return the derivative of a loss by each log-probability; keep the graph for the backward."""
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    (slopes,) = torch.autograd.grad(loss, logprobs, retain_graph=True, materialize_grads=True, allow_unused=True)
    return slopes


def _reduce(per_token: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    return (masked_fill_invalid(per_token, valid) * weights).sum()
