"""Faults in the optimizer step: missing microbatches, other forwards, lost gradients and updates."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kit.support import tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2ForCausalLM
from typing_extensions import override

import lightning_rl.policy.logprobs
import lightning_rl.run.training
import lightning_rl.update
from faults.fault import PPO, SMALL, STEPS, Fault, hooks, user
from faults.patches import accumulating, after
from lightning_rl import LossView, Rollout, ValueLoss
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import AdaptiveKL, EntropyBonus
from lightning_rl.policy import Plan, PolicyModel

FORWARD, VALUES, STEP = PolicyModel.forward, PolicyModel._values, LightningOptimizer.step  # noqa: SLF001
ACCUMULATE, VIEW, LOSS = (
    lightning_rl.run.training.accumulate_gradient,
    lightning_rl.update.loss_view,
    Algorithm.microbatch_loss,
)
UPDATE = "update|accumulation|microbatch|backward"


# Gradients of the entropy, and coefficients that follow a measurement.


def plain_entropy(scores: Tensor, targets: Tensor, slopes: Tensor, entropy: Tensor, by_entropy: Any) -> None:
    LOGIT_GRADIENT(scores, targets, slopes, torch.zeros_like(entropy), by_entropy)


def adapt_twice(self: AdaptiveKL, rollout: Rollout) -> None:
    OBSERVE(self, rollout)
    OBSERVE(self, rollout)


LOGIT_GRADIENT, OBSERVE = lightning_rl.policy.logprobs._logit_gradient, AdaptiveKL.observe  # noqa: SLF001


# Missing or repeated microbatches.


def without_last_microbatch(plan: Plan, *_: Any) -> Plan:
    return Plan(tuple(step[:-1] if len(step) > 1 else step for step in plan.minibatches))


def with_microbatches(change: Callable[[Any], Any]) -> Any:
    """Train on other microbatches than those of the plan."""

    def accumulate(rollout: Any, microbatches: Any, *further: Any, **options: Any) -> Any:
        return ACCUMULATE(rollout, change(microbatches), *further, **options)

    return patch.object(lightning_rl.run.training, "accumulate_gradient", accumulate)


def second_backward_lost(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    seen: list[None] = []

    def some_backward(loss: Tensor) -> None:
        seen.append(None)
        if len(seen) != 2:
            backward(loss)

    return some_backward


def rounding_gradients(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    def rounded_backward(loss: Tensor) -> None:
        backward(loss)
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())

    return rounded_backward


# Forwards of the update that differ from the old pass.


def in_update(change: Callable[[Tensor, Any], Tensor]) -> Any:
    """Change the log-probabilities of forwards with gradient."""

    def forward(self: PolicyModel, layout: Any) -> Any:
        outputs = FORWARD(self, layout)
        if not torch.is_grad_enabled():
            return outputs
        return outputs._replace(logprobs=change(outputs.logprobs, layout))

    return patch.object(PolicyModel, "forward", forward)


def under_autocast(logprobs: Tensor, layout: Any) -> Tensor:
    return logprobs + (logprobs.bfloat16().float() - logprobs).detach()


def with_dropout(logprobs: Tensor, layout: Any) -> Tensor:
    return logprobs + 0.05 * torch.sin(37 * logprobs.detach()) * (logprobs.detach() != 0)


def of_row_above(logprobs: Tensor, layout: Any) -> Tensor:
    return logprobs.roll(1, 0)


def without_gradient_at_eos(logprobs: Tensor, layout: Any) -> Tensor:
    end = layout.scatter((layout.targets == 1).to(logprobs.dtype)) > 0
    return torch.where(end, logprobs.detach(), logprobs)


# Parts of the loss without a gradient.


def detached_values(self: PolicyModel, states: Tensor, layout: Any) -> Tensor | None:
    values = VALUES(self, states, layout)
    return None if values is None else values.detach()


def values_times_zero(self: PolicyModel, states: Tensor, layout: Any) -> Tensor | None:
    values = VALUES(self, states, layout)
    return None if values is None else values.detach() + 0.0 * values


def without_value_loss(self: Algorithm, view: LossView, weights_of: Any) -> Any:
    loss = LOSS(self, view, weights_of)
    silent = dataclasses.replace(self.value_loss, coef=0.0)
    return loss._replace(total=LOSS(self.replace(value_loss=silent), view, weights_of).total)


def without_entropy_gradient(rows: Any, outputs: Any, *, entropy_gradient: bool = False) -> LossView:
    return VIEW(rows, outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadValueLoss(ValueLoss):
    """Detaches the values."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return super().__call__(values.detach(), old_values, returns) + 0 * values


class BlindEntropyBonus(EntropyBonus):
    """Does not declare that it trains the entropy."""

    trains_entropy = False


def last_token(view: LossView) -> Tensor:
    """Return the last valid token of each row."""
    behind = view.valid_tokens.long().flip(-1).cumsum(-1).flip(-1)
    return view.valid_tokens & (behind == 1)


def shifted_by_one(view: LossView) -> Tensor:
    loss = -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")
    return torch.where(last_token(view), 0.0, loss)


# Parameters that do not move or move twice.


def cut_policy() -> Qwen2ForCausalLM:
    model = tiny_policy()
    model.model.layers[0].register_forward_hook(lambda _layer, _inputs, output: output.detach())
    return model


def forgotten_gradients(trainer: Any, pl_module: Any, optimizer: Any) -> None:
    for name, parameter in pl_module.named_parameters():
        if "norm" in name:
            parameter.grad = None


class FrozenLayer(Callback):
    """Restores the second layer after every step."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        layer = pl_module.policy.model.model.layers[1]
        self.kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        pl_module.policy.model.model.layers[1].load_state_dict(self.kept)


def forgotten_moments(trainer: Any, pl_module: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def climb(trainer: Any, pl_module: Any) -> None:
    """Maximize the loss; at setup, the option would be refused."""
    for group in trainer.optimizers[0].param_groups:
        group["maximize"] = True


def steps_ahead(trainer: Any, pl_module: Any, optimizer: Any) -> None:
    getattr(optimizer, "optimizer", optimizer).step()


class Impatient(AdamW):
    """Steps twice."""

    @override
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class Hesitant(AdamW):
    """Steps at every second call, as with gradient accumulation."""

    calls = 0

    @override
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls % 2 else None


def step_twice(self: LightningOptimizer, *arguments: Any, **options: Any) -> Any:
    STEP(self, *arguments, **options)
    return STEP(self, *arguments, **options)


def half_asleep(groups: list[dict[str, Any]]) -> AdamW:
    parameters = [parameter for group in groups for parameter in group["params"]]
    half = len(parameters) // 2
    return AdamW([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.0}], lr=0.05)


def rate_in_whole_numbers(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: step // 1000)


def keep_gradient(self: torch.optim.Optimizer, **_: Any) -> None:
    """Do not clear the gradient."""


FAULTS: tuple[Fault, ...] = (
    Fault(
        "an entropy whose own mean has no gradient",
        "forward",
        "token_gradients",
        callbacks=lambda: [EntropyBonus(0.05)],
        patches=[patch.object(lightning_rl.policy.logprobs, "_logit_gradient", plain_entropy)],
    ),
    Fault(
        "a coefficient that is adapted twice",
        "adaptive_kl.observe",
        "parent_promises",
        callbacks=lambda: [AdaptiveKL(0.1, target=0.02)],
        options=PPO,
        patches=[patch.object(AdaptiveKL, "observe", adapt_twice)],
    ),
    Fault(
        "the last microbatch never planned",
        "plan",
        options=SMALL,
        patches=[after(lightning_rl.run.training, "make_plan", without_last_microbatch)],
    ),
    Fault(
        "a microbatch that never came",
        f"{UPDATE}|plan",
        options=SMALL,
        patches=[with_microbatches(lambda microbatches: microbatches[1:] or microbatches)],
    ),
    Fault("a backward that was left out", UPDATE, options=SMALL, patches=[accumulating(second_backward_lost)]),
    Fault("the update alone in bfloat16", "update|policy", options=STEPS, patches=[in_update(under_autocast)]),
    Fault("dropout in the update, without an old pass", "update|policy", patches=[in_update(with_dropout)]),
    Fault("the update sees the log-probabilities of the row above", "update|policy", patches=[in_update(of_row_above)]),
    Fault("a first layer cut off from the gradient", "parameter|policy|layers", options={"policy": cut_policy}),
    user("gradients of norms forgotten before the step", hooks(on_before_optimizer_step=forgotten_gradients)),
    Fault(
        "gradients summed up in bfloat16",
        f"{UPDATE}|gradient",
        options=SMALL,
        patches=[accumulating(rounding_gradients)],
    ),
    Fault("a value loss of detached values", "DeadValueLoss|value", options={**PPO, "value_loss": DeadValueLoss()}),
    Fault(
        "a value head without gradient",
        "value|critic",
        options=PPO,
        patches=[patch.object(PolicyModel, "_values", detached_values)],
    ),
    Fault(
        "a value head with a gradient of 0",
        "value_head.weight",
        check="parameter_gradient",
        options=PPO,
        patches=[patch.object(PolicyModel, "_values", values_times_zero)],
    ),
    Fault(
        "the value loss left out",
        "value|critic|objective",
        options=PPO,
        patches=[patch.object(Algorithm, "microbatch_loss", without_value_loss)],
    ),
    user("an entropy bonus without gradient", partial(BlindEntropyBonus, 0.1), culprit="entropy_bonus"),
    user(
        "an update that hands out entropy without gradient",
        partial(EntropyBonus, 0.1),
        culprit="entropy|update",
        patches=[patch.object(lightning_rl.update, "loss_view", without_entropy_gradient)],
    ),
    Fault(
        "no gradient at the end of a response",
        "policy|update",
        options=STEPS,
        patches=[in_update(without_gradient_at_eos)],
    ),
    Fault("a loss that leaves the last token out", "shifted_by_one", options={"loss": shifted_by_one, **STEPS}),
    Fault("an optimizer that steps twice", "Impatient|optimizer", options={"optimizer": partial(Impatient, lr=0.05)}),
    Fault(
        "an optimizer that steps at every second call",
        "Hesitant|optimizer",
        options={"optimizer": partial(Hesitant, lr=0.05)},
    ),
    Fault(
        "a loop that steps twice",
        "optimizer|update|step",
        patches=[patch.object(LightningOptimizer, "step", step_twice)],
    ),
    user("a hook that steps before the step", hooks(on_before_optimizer_step=steps_ahead)),
    Fault(
        "a constant rate of 0 by an integer division",
        "rate_in_whole_numbers|scheduler|rate|lr",
        options={"lr_scheduler": rate_in_whole_numbers},
    ),
    Fault("a rate of 0 for half of the parameters", "half_asleep|optimizer", options={"optimizer": half_asleep}),
    user("a layer put back after every step", FrozenLayer),
    Fault(
        "updates lost in bfloat16",
        "bfloat16|optimizer|parameter|weights",
        options={"policy": tiny_policy, "optimizer": partial(AdamW, lr=1e-6)},
        trainer={"precision": "bf16-true"},
    ),
    user("moments forgotten before every step", hooks(on_before_optimizer_step=forgotten_moments)),
    Fault(
        "a gradient that is never cleared",
        f"{UPDATE}|optimizer|gradient",
        patches=[patch.object(torch.optim.Optimizer, "zero_grad", keep_gradient)],
    ),
    Fault(
        "an optimizer that climbs",
        "optimizer|AdamW",
        callbacks=lambda: [hooks(on_train_start=climb)()],
        options={"optimizer": partial(AdamW, lr=0.05)},
        data=lambda: tiny_prompts(16, 4),
    ),
)
