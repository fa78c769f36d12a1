"""Faults of a user's hook, mask, bonus or optimizer, which must be named as the culprit."""

import dataclasses
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kit.support import tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from faults.fault import PPO, SMALL, STEPS, Fault, correction, hooks, user
from lightning_rl import LossView, RLLightningModule
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy import Plan


def halved_gradients(trainer: Any, pl_module: Any) -> None:
    for parameter in pl_module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


class KeptInValidation(Callback):
    """Validates with averaged weights, and does not restore the weights."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for name, weight in pl_module.named_parameters():
                if name in getattr(self, "start", {}):
                    weight.lerp_(self.start[name], 0.5)


def rounded_at_save(trainer: Any, pl_module: Any, checkpoint: Any) -> None:
    with torch.no_grad():
        for weight in pl_module.parameters():
            weight.copy_(weight.half())


def cleared_state(trainer: Any, pl_module: Any) -> None:
    for optimizer in trainer.optimizers:
        optimizer.state.clear()


def clipped_again(trainer: Any, pl_module: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(pl_module.parameters(), 1e-4)


def second_schedule_step(trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.lr_schedulers().step()


def drifting_reference(trainer: Any, pl_module: Any, *_: Any) -> None:
    with torch.no_grad():
        for weight in pl_module.models.reference.model.parameters():
            weight.mul_(1.01)


def frozen_critic(groups: Any) -> Any:
    """Return an optimizer whose critic has a rate of 0."""
    return AdamW([{**group, "lr": 0.01 * (group["name"] != "critic")} for group in groups])


class AveragedWeights(Callback):
    """Swaps averaged weights in after a step, and does not swap them out."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mean = [parameter.detach().clone() for parameter in pl_module.parameters()]

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.mean, pl_module.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
                parameter.copy_(mean)


def patient_rate(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
    if batch_idx >= 2:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0


def trimmed_plan(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
    current = pl_module.run.progress.current
    if current is not None and batch.step:
        plan = Plan(tuple(step[:-1] if len(step) > 1 else step for step in current.plan.minibatches))
        trimmed = dataclasses.replace(current, plan=plan)
        pl_module.run.progress.current = trimmed


def every_other_row(view: LossView) -> Tensor:
    return (torch.arange(len(view)) % 2 == 0)[:, None].expand_as(view.valid_tokens).clone()


def halved_by_the_module(self: RLLightningModule) -> None:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


FAULTS: tuple[Fault, ...] = (
    user("a hook that halves gradients after the backward", hooks(on_after_backward=halved_gradients), options=SMALL),
    Fault(
        "a module's own hook that halves gradients",
        "on_after_backward",
        options=SMALL,
        patches=[patch.object(RLLightningModule, "on_after_backward", halved_by_the_module)],
    ),
    user("a hook that clips again", hooks(on_before_optimizer_step=clipped_again)),
    user("averaged weights left in place", AveragedWeights),
    user(
        "averaged weights not put back after validation",
        KeptInValidation,
        check="quiet_hooks",
        data=lambda: tiny_prompts(16, 4, validation=[[5, 5, n] for n in (6, 7)]),
        trainer={"max_epochs": 2},
    ),
    user(
        "weights rounded when they are saved",
        hooks(on_save_checkpoint=rounded_at_save),
        partial(ModelCheckpoint, every_n_train_steps=1),
        check="quiet_hooks",
        trainer={"enable_checkpointing": True},
    ),
    user(
        "the optimizer's state cleared at each epoch",
        hooks(on_train_epoch_start=cleared_state),
        check="quiet_hooks",
        data=lambda: tiny_prompts(8, 4),
        trainer={"max_epochs": 3},
    ),
    user(
        "a hook that steps the scheduler",
        hooks(on_train_batch_end=second_schedule_step),
        check="optimizer_moves",
        options={"lr_scheduler": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step))},
    ),
    user(
        "a hook that moves the reference",
        hooks(on_train_batch_start=drifting_reference),
        partial(ReferenceKL, as_loss=True),
        check="reference_stays",
    ),
    Fault("a critic with a rate of 0", "optimizer", "optimizer_rule", options={**PPO, "optimizer": frozen_critic}),
    user("a hook that ends learning by the rate", hooks(on_train_batch_start=patient_rate)),
    user("a hook that trims the plan", hooks(on_train_batch_start=trimmed_plan), options={**STEPS, **SMALL}),
    user("a mask by the place in a microbatch", correction(token_mask=every_other_row)),
)
