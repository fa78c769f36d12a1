"""One optimizer step as it really was: each small fault is found by its check, under the name of who made it."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import SGD, AdamW
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, RLLightningModule, ValueLoss
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.optimizer_rules import move_by_rule
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.corrections import ParameterTrace
from lightning_rl.optimizers import fused_adamw


def found(
    *callbacks: Callback, module: RLLightningModule | None = None, checks: Sequence[str] | None = None, **options: Any
) -> set[tuple[str, str]]:
    """Check and culprit of every finding of two rollouts."""
    audit = SignalAudit(1, checks=checks)
    module = (
        tiny_module(**{"minibatches_per_rollout": 2, "max_tokens_per_microbatch": 60, **options})
        if module is None
        else module
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, callbacks=[*callbacks, audit], data=tiny_prompts(8, 4))
    return {(finding.check, finding.culprit) for finding in audit.findings}


def hook(name: str, act: Callable[..., object]) -> Callback:
    """A callback of somebody with one hook."""

    def run(_self: Any, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        act(module)

    return type("Somebody", (Callback,), {name: run})()


def scale_gradients(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def in_bfloat16(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.bfloat16().float()


def forget_head(module: Any) -> None:
    module.policy.model.lm_head.weight.grad = None


@torch.no_grad()
def decay(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.999)


def step_again(module: Any) -> None:
    module.trainer.optimizers[0].step()


def reset_moments(module: Any) -> None:
    for state in module.trainer.optimizers[0].state.values():
        state["exp_avg"].zero_()


def freeze(module: Any) -> None:
    module.policy.model.lm_head.weight.requires_grad_(requires_grad=False)


def touch_metrics(module: Any) -> None:
    module.run.metrics.groups["step"].moments.mul_(2.0)


@pytest.mark.parametrize(
    ("where", "act", "what"),
    [
        ("on_after_backward", scale_gradients, "gradients"),
        ("on_before_optimizer_step", in_bfloat16, "gradients"),
        ("on_before_optimizer_step", forget_head, "gradients"),
        ("on_train_batch_end", decay, "weights"),
        ("on_after_backward", step_again, "weights"),
        ("on_train_batch_end", reset_moments, "optimizer"),
        ("on_train_batch_start", freeze, "trained parameters"),
        ("on_train_batch_end", touch_metrics, "metrics"),
    ],
)
def test_whoever_changes_the_state_of_a_run_in_a_hook_is_named(where: str, act: Any, what: str) -> None:
    pairs = found(hook(where, act))
    assert ("quiet_hooks", f"callback Somebody.{where}") in pairs, what
    assert {culprit for _, culprit in pairs} == {f"callback Somebody.{where}"}, "and nobody else"


def test_a_hook_of_the_module_is_named_too() -> None:
    class Mine(RLLightningModule):
        @override
        def on_after_backward(self) -> None:
            scale_gradients(self)

    base = tiny_module()
    mine = Mine(**{**base.options, "minibatches_per_rollout": 2, "max_tokens_per_microbatch": 60})
    assert {culprit for _, culprit in found(module=mine)} == {"module Mine.on_after_backward"}


def test_a_learning_rate_that_a_callback_sets_is_its_own_business() -> None:
    def slower(module: Any) -> None:
        module.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9

    assert found(hook("on_train_batch_start", slower)) == set()


def test_what_is_meant_is_declared_and_no_alarm() -> None:
    meant = "quiet_hooks: callback Somebody.on_train_batch_end"
    audit = SignalAudit(1, "raise", deliberate=[meant])
    fit(tiny_module(), callbacks=[hook("on_train_batch_end", decay), audit], data=tiny_prompts(8, 4))
    assert not audit.findings and [finding.check for finding in audit.declared] == ["quiet_hooks"] * 2


def test_a_gradient_hook_of_a_parameter_is_named() -> None:
    class Hung(Callback):
        @override
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.policy.model.lm_head.weight.register_hook(coarse)

    ((check, culprit),) = found(Hung())
    assert check == "parameter_gradient"
    assert culprit == "the gradient hook coarse of parameter model.lm_head.weight"


def coarse(gradient: Tensor) -> Tensor:
    """Rounds."""
    return gradient.bfloat16().float()


class Twice(AdamW):
    """Makes every step two times."""

    @override
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Tenth(AdamW):
    """Moves by a tenth of what its rule says."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        old = [weight.clone() for group in self.param_groups for weight in group["params"]]
        super().step(closure)
        for weight, was in zip((w for group in self.param_groups for w in group["params"]), old, strict=True):
            weight.copy_(was + 0.1 * (weight - was))


def test_an_optimizer_that_steps_twice_is_found_by_the_rule_of_the_first_step() -> None:
    class AdamW(Twice):
        """Called as the one that it is not."""

    assert ("optimizer_rule", "optimizer AdamW") in found(optimizer=partial(AdamW, lr=1e-2))


def test_an_optimizer_that_moves_too_little_is_found() -> None:
    kind = type("AdamW", (Tenth,), {})
    assert found(optimizer=partial(kind, lr=1e-2)) == {("optimizer_rule", "optimizer AdamW")}


def test_a_hook_in_the_optimizer_is_named() -> None:
    def louder(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.neg_()

    def build(groups: Any) -> AdamW:
        optimizer = AdamW(groups, lr=1e-2)
        optimizer.register_step_pre_hook(louder)
        return optimizer

    ((check, culprit),) = found(optimizer=build)
    assert check == "parameter_gradient" and culprit.endswith(
        "its hook test_a_hook_in_the_optimizer_is_named.<locals>.louder"
    )


def test_a_rate_of_zero_for_ever_is_found_and_one_group_at_zero_is_not() -> None:
    assert found(optimizer=partial(AdamW, lr=0.0)) == {("optimizer_rule", "optimizer AdamW")}

    def critic_first(groups: list[dict[str, Any]]) -> AdamW:
        return AdamW([{**group, "lr": 0.0 if group["name"] == "policy" else 1e-2} for group in groups])

    assert found(advantages="gae", critic="shared", optimizer=critic_first) == set()


def test_updates_that_are_lost_in_bfloat16_are_found() -> None:
    audit = SignalAudit(1, checks=["optimizer_rule"])
    module = tiny_module(optimizer=partial(AdamW, lr=1e-6), policy=partial(tiny_policy, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="it is lost in bfloat16"):
        fit(module, callbacks=[audit], data=tiny_prompts(4, 4), precision="bf16-true")


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(fused_adamw, lr=1e-2, weight_decay=0.1),
        partial(AdamW, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1),
        partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    ],
)
def test_optimizers_with_a_known_rule_follow_it(optimizer: Any) -> None:
    audit = SignalAudit(1, "raise", checks=["optimizer_rule", "parameter_gradient", "optimizer_moves"])
    fit(tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, optimizer=optimizer), callbacks=[audit])
    assert not audit.findings and not audit.skipped


def test_an_optimizer_without_a_known_rule_is_skipped_aloud() -> None:
    audit = SignalAudit(1, "raise", checks=["optimizer_rule"])
    fit(tiny_module(optimizer=partial(torch.optim.RMSprop, lr=1e-3)), callbacks=[audit], data=tiny_prompts(4, 4))
    assert audit.skipped == {"optimizer_rule": "the rule of RMSprop with these options is not known here"}


def test_a_move_of_adamw_is_that_of_a_hand_computation() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    state = {"step": torch.tensor(0.0), "exp_avg": 0 * one, "exp_avg_sq": 0 * one}
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0, "weight_decay": 0.5}
    trace = ParameterTrace(
        summed=one, gradient=-3 * one, before=2 * one, after=2 * one, lr=0.1, options=options, state=state
    )
    move = move_by_rule("AdamW", trace)
    assert move is not None and float(move.by) == pytest.approx(0.1 - 0.1 * 0.5 * 2)  # the first step is the rate


def without_a_microbatch(update: Any) -> Callable[..., Any]:
    """The update, in which the last of several microbatches never comes."""

    def accumulate(rollout: Any, microbatches: Any, *arguments: Any, **keywords: Any) -> Any:
        return update(rollout, microbatches[:-1] or microbatches, *arguments, **keywords)

    return accumulate


def test_a_microbatch_that_never_came_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_rl import module

    monkeypatch.setattr(module, "accumulate_gradient", without_a_microbatch(module.accumulate_gradient))
    assert ("step_rows", "stage update, the microbatches of the step") in found(max_tokens_per_microbatch=24)


def test_a_plan_without_some_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_rl import module

    make_plan = module.make_plan

    def forgetful(rollout: Any, **options: Any) -> Any:
        return make_plan(rollout.replace(trained=rollout.trained & (torch.arange(len(rollout)) > 1)), **options)

    monkeypatch.setattr(module, "make_plan", forgetful)
    assert ("step_rows", "stage plan") in found()


def test_a_forward_in_training_that_is_another_one_is_found() -> None:
    class Warm(RLCallback):
        """Another temperature, from the update's forward on."""

        name = "warm"

        @override
        def observe(self, rollout: Any) -> None:
            self.policy.temperature *= 1.3

        @override
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.policy.temperature /= 1.3

        @override
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.policy = pl_module.policy

    assert ("first_forward", "stage update, the policy's forward in training") in found(
        Warm(), minibatches_per_rollout=1, epochs_per_rollout=2
    )


class NotAtTheEnd(ReferenceKL):
    """A KL that forgets the last token of each response."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        term = super().loss_term(view)
        order = view.valid_tokens.cumsum(-1)
        return dataclasses.replace(term, per_token=torch.where(order == order[:, -1:], 0.0, term.per_token))


def test_a_term_that_forgets_the_end_of_responses_is_found() -> None:
    assert found(NotAtTheEnd(0.1, as_loss=True)) == {("gradient_liveness", "callback reference_kl.loss_term")}


def not_at_the_start(view: LossView) -> Tensor:
    """A policy loss that forgets the first token."""
    loss = -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")
    return torch.where(view.valid_tokens.cumsum(-1) == 1, 0.0 * loss, loss)


def test_a_loss_that_forgets_the_first_token_is_found() -> None:
    assert found(loss=not_at_the_start) == {("gradient_liveness", "loss not_at_the_start")}


class Deaf(ValueLoss):
    """A value loss that trains no critic."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return super().__call__(values.detach(), old_values, returns)


def test_a_value_loss_without_a_gradient_is_found() -> None:
    assert found(advantages="gae", critic="shared", value_loss=Deaf()) == {("gradient_liveness", "the value loss")}
