"""One optimizer step: faults that tests/faults does not inject, their culprits, and legal optimizers."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from typing_extensions import override

from lightning_rl import LossView, RLLightningModule, warmup_then_linear
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.optimizer_rules import move_by_rule
from lightning_rl.audit.parameter_tracer import ParameterTrace
from lightning_rl.corrections import StepTrace
from lightning_rl.optimizers import fused_adamw


def found(
    *callbacks: Callback,
    module: RLLightningModule | None = None,
    checks: Sequence[str] | None = None,
    rollouts: int = 3,
    **options: Any,
) -> set[tuple[str, str]]:
    """Return check and culprit of every finding."""
    audit = SignalAudit(1, checks=checks)
    module = (
        tiny_module(**{"minibatches_per_rollout": 2, "max_tokens_per_microbatch": 60, **options})
        if module is None
        else module
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, callbacks=[*callbacks, audit], data=tiny_prompts(4 * rollouts, 4))
    return {(finding.check, finding.culprit) for finding in audit.findings}


def hook(name: str, act: Callable[..., object]) -> Callback:
    """Return a user's callback with one hook."""

    def run(_self: Any, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        act(module)

    return type("Hooked", (Callback,), {name: run})()


@torch.no_grad()
def decay(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.999)


@pytest.mark.nightly
def test_a_callback_may_set_the_learning_rate_but_not_to_zero() -> None:
    def scale_rate(factor: float) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            module.trainer.optimizers[0].param_groups[0]["lr"] *= factor

        return act

    assert found(hook("on_train_batch_start", scale_rate(0.9))) == set()
    assert found(hook("on_train_start", scale_rate(0.0))) == {("optimizer_rule", "callback Hooked.on_train_start")}


@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_a_schedule_that_ends_before_the_run_is_one_finding_with_a_fitting_cure() -> None:
    audit = SignalAudit(1)
    module = tiny_module(minibatches_per_rollout=2, lr_scheduler=warmup_then_linear(0, 4))
    with pytest.warns(UserWarning, match="end the run where its schedule ends"):
        fit(module, callbacks=[audit], data=tiny_prompts(24, 4))
    (finding,) = audit.findings
    assert finding.culprit.startswith("scheduler WarmupThenLinear") and finding.observed.startswith("0 for every")


def test_deliberate_changes_of_a_hook_are_declared_and_give_no_alarm() -> None:
    audit = SignalAudit(1, "raise", deliberate=["quiet_hooks: callback Hooked.on_train_batch_end"])
    fit(tiny_module(), callbacks=[hook("on_train_batch_end", decay), audit], data=tiny_prompts(8, 4))
    assert not audit.findings and [finding.check for finding in audit.declared] == ["quiet_hooks"] * 2


def test_a_gradient_hook_of_a_parameter_is_named() -> None:
    def register(module: Any) -> None:
        module.policy.model.lm_head.weight.register_hook(coarse)

    culprit = "the gradient hook coarse of parameter model.lm_head.weight"
    assert found(hook("on_train_start", register)) == {("parameter_gradient", culprit)}


def coarse(gradient: Tensor) -> Tensor:
    """Round a gradient to bfloat16."""
    return gradient.bfloat16().float()


def test_a_hook_of_the_optimizer_is_named() -> None:
    def build(groups: Any) -> AdamW:
        optimizer = AdamW(groups, lr=1e-2)
        optimizer.register_step_pre_hook(negate_gradients)
        return optimizer

    culprit = "optimizer AdamW, its hook negate_gradients"
    assert found(optimizer=build) == {("parameter_gradient", culprit)}


def weights_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def negate_gradients(optimizer: Optimizer, *_: Any) -> None:
    for weight in weights_of(optimizer):
        if weight.grad is not None:
            weight.grad.neg_()


def subclass(kind: type[Optimizer], **members: Any) -> Any:
    return type("Mine", (kind,), members)


def step_of_parent(optimizer: Any, closure: Any = None) -> Any:
    parent: Any = super(type(optimizer), optimizer)  # pyrefly: ignore[invalid-argument]
    return parent.step(closure)


def step_twice(self: Any, closure: Any = None) -> Any:
    step_of_parent(self)
    return step_of_parent(self, closure)


def step_sometimes(self: Any, closure: Any = None) -> Any:
    self.calls = getattr(self, "calls", 0) + 1
    return step_of_parent(self, closure) if self.calls % 2 else None


@torch.no_grad()
def step_uphill(self: Any, closure: Any = None) -> None:
    before = [weight.detach().clone() for weight in weights_of(self)]
    step_of_parent(self, closure)
    for weight, was in zip(weights_of(self), before, strict=True):
        weight.copy_(2 * was - weight)


@torch.no_grad()
def step_by_half(self: Any, closure: Any = None) -> None:
    before = [weight.detach().clone() for weight in weights_of(self)]
    step_of_parent(self, closure)
    for weight, was in list(zip(weights_of(self), before, strict=True))[::2]:
        weight.copy_(was)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "step"),
    [(AdamW, step_by_half), (Adam, step_sometimes), (SGD, step_twice), (RMSprop, step_uphill), (RMSprop, step_by_half)],
)
def test_a_subclass_of_an_optimizer_follows_the_rule_of_its_parent(kind: Any, step: Callable[..., Any]) -> None:
    pairs = found(optimizer=partial(subclass(kind, step=step), lr=1e-2))
    assert pairs and all("optimizer Mine" in culprit for _, culprit in pairs)
    assert "optimizer_rule" in {check for check, _ in pairs} or kind is RMSprop, "whose rule is unknown"


class Wrapper(Optimizer):
    """An optimizer that holds another one and steps it several times."""

    def __init__(self, groups: Any, times: int) -> None:
        super().__init__(groups, {"lr": 1e-2})
        self.inner, self.times = AdamW(self.param_groups, lr=1e-2), times

    @override
    def step(self, closure: Any = None) -> Any:
        for _ in range(self.times):
            self.inner.step()


def test_a_wrapper_that_steps_twice_is_found_by_the_count_of_the_optimizer_that_it_holds() -> None:
    assert found(optimizer=partial(Wrapper, times=1)) == set()
    assert found(optimizer=partial(Wrapper, times=2)) == {("optimizer_rule", "optimizer Wrapper")}


def test_parameters_that_no_output_depends_on_need_no_gradient() -> None:
    def policy() -> Any:
        model = tiny_policy()
        model.unused = torch.nn.Linear(3, 3)
        return model

    assert found(policy=policy) == set()


def test_a_backward_that_loses_the_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = StepTrace.follow

    def forgetful(self: StepTrace, view: LossView, *inputs: Any) -> Any:
        order = view.valid_tokens.cumsum(-1)
        view.logprobs.register_hook(lambda gradient: torch.where(order == order[:, -1:], 0.0, gradient))
        return follow(self, view, *inputs)

    monkeypatch.setattr(StepTrace, "follow", forgetful)
    culprit = "loss ClippedSurrogate, or the backward, at the last token of each response"
    assert ("step_gradient", culprit) in found()


def not_at_the_start(view: LossView) -> Tensor:
    """A policy loss without the first token."""
    loss = -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")
    return torch.where(view.valid_tokens.cumsum(-1) == 1, 0.0 * loss, loss)


def test_a_loss_without_the_first_token_is_found() -> None:
    assert found(loss=not_at_the_start, rollouts=2) == {("gradient_liveness", "loss not_at_the_start")}


def fail_on_some(completions: Any, **_: Any) -> list[float | None]:
    return [math.nan if row % 4 == 0 else None if row % 4 == 1 else float(row) for row in range(len(completions))]


def fail_on_all(**_: Any) -> list[float]:
    raise ValueError


@pytest.mark.parametrize("advantages", ["grpo", "remax"])
def test_failures_of_rewards_are_counted_for_greedy_answers_too(advantages: str) -> None:
    rewards = {"some": fail_on_some, "all": (fail_on_all, 0.0), "parity": parity_reward}
    assert found(rollouts=2, rewards=rewards, advantages=advantages) == set()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(fused_adamw, lr=1e-2, weight_decay=0.1),
        partial(AdamW, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1),
        partial(Adam, lr=1e-2, weight_decay=0.1),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    ],
)
def test_optimizers_with_a_known_rule_follow_it(optimizer: Any) -> None:
    audit = SignalAudit(1, "raise", checks=["optimizer_rule", "parameter_gradient", "optimizer_moves"])
    fit(tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, optimizer=optimizer), callbacks=[audit])
    assert not audit.findings and not audit.skipped


def test_an_optimizer_without_a_known_rule_is_skipped() -> None:
    audit = SignalAudit(1, "raise", checks=["optimizer_rule"])
    fit(tiny_module(optimizer=partial(RMSprop, lr=1e-3)), callbacks=[audit], data=tiny_prompts(4, 4))
    assert audit.skipped == {"optimizer_rule": "the rule of RMSprop with these options is unknown"}


def test_a_move_of_adamw_is_that_of_a_hand_computation() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    state = {"step": torch.tensor(0.0), "exp_avg": 0 * one, "exp_avg_sq": 0 * one}
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0, "weight_decay": 0.5}
    trace = ParameterTrace(
        summed=one, gradient=-3 * one, before=2 * one, after=2 * one, lr=0.1, options=options, state=state
    )
    move = move_by_rule("AdamW", trace)
    assert move is not None and float(move.by) == pytest.approx(0.1 - 0.1 * 0.5 * 2)  # the first step is the rate


def orthogonal(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


class Orthogonal(Optimizer):
    """Moves matrices by the orthogonal factor of their averaged gradient, as Muon does, and the rest by its sign."""

    def __init__(self, groups: Any, lr: float = 1e-2) -> None:
        super().__init__(groups, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight in weights_of(self):
            if weight.grad is not None:
                mean = self.state[weight]["mean"] = 0.9 * self.state[weight].get("mean", 0.0) + weight.grad
                weight.sub_(1e-2 * (orthogonal(mean) if mean.dim() > 1 else mean.sign()))


class Lookahead(Optimizer):
    """Returns to a slow average every third step."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2})
        self.inner, self.calls = AdamW(self.param_groups, lr=1e-2), 0
        self.slow = [weight.detach().clone() for weight in weights_of(self)]

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.calls += 1
        for slow, weight in zip(self.slow, weights_of(self), strict=True) if self.calls % 3 == 0 else ():
            slow.lerp_(weight, 0.5)
            weight.copy_(slow)


class Centred(AdamW):
    """A subclass with an option, and so a rule, that AdamW lacks."""

    def __init__(self, groups: Any, lr: float = 1e-2) -> None:
        super().__init__(groups, lr=lr)
        self.defaults["centre"] = True


LEGAL: dict[str, Any] = {
    "muon-like": Orthogonal,
    "lookahead": Lookahead,
    "a subclass with an option": Centred,
    "a subclass without one": subclass(AdamW, step=lambda self, closure=None: AdamW.step(self, closure)),
    "foreach": partial(AdamW, lr=1e-2, foreach=True),
    "fused": partial(Adam, lr=1e-2, fused=True),
    "amsgrad": partial(AdamW, lr=1e-2, amsgrad=True),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", LEGAL.values(), ids=LEGAL)
def test_no_alarm_for_legal_optimizers(optimizer: Any) -> None:
    assert found(optimizer=optimizer, epochs_per_rollout=2, lr_scheduler=warmup_then_linear(4, 100)) == set()
