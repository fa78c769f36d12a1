"""Quiet faults of optimizers, schedules, gradients, plans and figures: each is found, under the name of who made it."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_rl import LossView, RLCallback, RLLightningModule, Stat, warmup_then_linear
from lightning_rl.audit import SignalAudit
from lightning_rl.corrections import StepTrace
from lightning_rl.metrics import MetricLog
from lightning_rl.rollouts.sample import Sampler


def culprits(
    *callbacks: Callback, module: RLLightningModule | None = None, rollouts: int = 3, **options: Any
) -> dict[str, set[str]]:
    """The culprits of each check that found something."""
    audit = SignalAudit(1)
    module = (
        tiny_module(**{"minibatches_per_rollout": 2, "max_tokens_per_microbatch": 60, **options})
        if module is None
        else module
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, callbacks=[*callbacks, audit], data=tiny_prompts(4 * rollouts, 4), logger=False)
    found: dict[str, set[str]] = {}
    for finding in audit.findings:
        found.setdefault(finding.check, set()).add(finding.culprit)
    return found


def named(kind: type[Optimizer], **members: Any) -> Any:
    """A subclass of an optimizer, as somebody writes it."""
    return type("Mine", (kind,), members)


def weights_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def parent(optimizer: Any) -> Any:
    """The optimizer as its parent class has it."""
    return super(type(optimizer), optimizer)


def step_twice(self: Any, closure: Any = None) -> Any:
    parent(self).step()
    return parent(self).step(closure)


def step_sometimes(self: Any, closure: Any = None) -> Any:
    self.calls = getattr(self, "calls", 0) + 1
    return parent(self).step(closure) if self.calls % 2 else None


def step_uphill(self: Any, closure: Any = None) -> Any:
    before = [weight.detach().clone() for weight in weights_of(self)]
    parent(self).step(closure)
    with torch.no_grad():
        for weight, was in zip(weights_of(self), before, strict=True):
            weight.copy_(2 * was - weight)


def step_by_half(self: Any, closure: Any = None) -> Any:
    before = [weight.detach().clone() for weight in weights_of(self)]
    parent(self).step(closure)
    with torch.no_grad():
        for weight, was in list(zip(weights_of(self), before, strict=True))[::2]:
            weight.copy_(was)


def step_on_edited_gradients(self: Any, closure: Any = None) -> Any:
    for weight in weights_of(self):
        if weight.grad is not None:
            weight.grad.neg_()
    return parent(self).step(closure)


STEPS = [step_twice, step_sometimes, step_uphill, step_by_half, step_on_edited_gradients]


@pytest.mark.parametrize(
    ("kind", "step"), [*((AdamW, step) for step in STEPS), (Adam, step_sometimes), (SGD, step_twice)]
)
def test_a_subclass_has_to_follow_the_rule_of_its_parent(kind: Any, step: Callable[..., Any]) -> None:
    found = culprits(optimizer=partial(named(kind, step=step), lr=1e-2))
    assert found and all("optimizer Mine" in one for few in found.values() for one in few)
    assert "optimizer_rule" in found or step is step_on_edited_gradients


@pytest.mark.parametrize("step", STEPS)
def test_an_optimizer_whose_rule_is_unknown_moves_once_downhill_and_everywhere(step: Callable[..., Any]) -> None:
    found = culprits(optimizer=partial(named(RMSprop, step=step), lr=1e-2))
    assert found and all("optimizer Mine" in one for few in found.values() for one in few)


class Wrapper(Optimizer):
    """An optimizer around another one, which it steps as often as it is told."""

    def __init__(self, groups: Any, times: int) -> None:
        super().__init__(groups, {"lr": 1e-2})
        self.inner, self.times = AdamW(self.param_groups, lr=1e-2), times

    @override
    def step(self, closure: Any = None) -> Any:
        for _ in range(self.times):
            self.inner.step()


def test_a_wrapper_that_steps_twice_is_found_by_the_count_of_the_optimizer_that_it_holds() -> None:
    assert culprits(optimizer=partial(Wrapper, times=1)) == {}
    assert culprits(optimizer=partial(Wrapper, times=2)) == {"optimizer_rule": {"optimizer Wrapper"}}


def test_an_optimizer_that_climbs_by_its_options_is_found() -> None:
    found = culprits(optimizer=partial(AdamW, lr=1e-2, maximize=True))
    assert found == {"optimizer_moves": {"optimizer AdamW"}}


def halves(groups: list[dict[str, Any]]) -> AdamW:
    """Two groups, of which one has no rate."""
    weights = [weight for group in groups for weight in group["params"]]
    return AdamW([{"params": weights[::2], "lr": 0.0}, {"params": weights[1::2]}], lr=1e-2)


def test_a_group_that_never_has_a_rate_is_found() -> None:
    found = culprits(optimizer=halves)
    assert found == {"optimizer_rule": {"optimizer AdamW"}}


def whole_numbers(optimizer: Optimizer) -> LambdaLR:
    """A warm-up that never begins."""
    return LambdaLR(optimizer, lambda step: min(step // 1000, 1))


def test_a_schedule_that_stays_at_zero_is_named() -> None:
    found = culprits(lr_scheduler=whole_numbers, optimizer=partial(AdamW, lr=1e-2))
    assert found == {"optimizer_rule": {"scheduler LambdaLR, whole_numbers.<locals>.<lambda>, built by whole_numbers"}}


@pytest.mark.parametrize("where", ["on_train_start", "on_train_batch_start", "on_before_optimizer_step"])
def test_a_hook_that_sets_the_rate_to_zero_is_named(where: str) -> None:
    def idle(_self: Any, trainer: Any, *_: Any, **__: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0

    found = culprits(type("Idle", (Callback,), {where: idle})(), optimizer=partial(AdamW, lr=1e-2))
    assert found["optimizer_rule"] == {f"callback Idle.{where}"}
    assert set(found) == {"optimizer_rule"} or where == "on_before_optimizer_step", "which comes after the rate is read"


def cut_policy(layer: int) -> Any:
    """A policy in which everything before a layer is cut off."""
    model = tiny_policy()

    def cut(_module: Any, arguments: tuple[Any, ...]) -> Any:
        return (arguments[0].detach(), *arguments[1:])

    model.model.layers[layer].register_forward_pre_hook(cut)
    return model


def test_parameters_that_the_forward_cuts_off_are_found() -> None:
    found = culprits(policy=partial(cut_policy, 0))
    assert found == {
        "parameter_gradient": {
            "policy, its parameter model.model.embed_tokens.weight, which something in its forward cuts off"
        }
    }


def test_parameters_on_which_nothing_depends_are_nobodys_fault() -> None:
    def policy() -> Any:
        model = tiny_policy()
        model.unused = torch.nn.Linear(3, 3)
        return model

    assert culprits(policy=policy) == {}


def test_a_backward_that_forgets_the_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = StepTrace.follow

    def forgetful(self: StepTrace, view: LossView) -> Any:
        order = view.valid_tokens.cumsum(-1)
        view.logprobs.register_hook(lambda gradient: torch.where(order == order[:, -1:], 0.0, gradient))
        return follow(self, view)

    monkeypatch.setattr(StepTrace, "follow", forgetful)
    assert culprits()["step_gradient"] == {"loss ClippedSurrogate, or the backward, at the last token of each response"}


def test_a_value_head_without_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_rl.policy import PolicyModel

    values = PolicyModel._values  # noqa: SLF001

    def values_without_gradient(self: Any, states: Tensor, layout: Any) -> Any:
        said = values(self, states, layout)
        return None if said is None else said.detach()

    monkeypatch.setattr(PolicyModel, "_values", values_without_gradient)
    found = culprits(advantages="gae", critic="shared")
    assert found["step_gradient"] == {"the critic: its value head, or the value loss"}
    assert not any("accumulation" in one for few in found.values() for one in few)


def louder(self: Any) -> None:
    for weight in self.parameters():
        if weight.grad is not None:
            weight.grad.mul_(1.5)


@pytest.mark.parametrize("where", ["of the class", "of the object", "of the base"])
def test_a_hook_of_the_module_that_scales_gradients_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_module(minibatches_per_rollout=2, max_tokens_per_microbatch=60)
    kind = type("Mine", (RLLightningModule,), {"on_after_backward": louder} if where == "of the class" else {})
    module = kind(**base.options)
    if where == "of the object":
        module.on_after_backward = louder.__get__(module)
    if where == "of the base":
        monkeypatch.setattr(RLLightningModule, "on_after_backward", louder)
    found = culprits(module=module)
    assert found and {one for few in found.values() for one in few} == {"module Mine.on_after_backward"}


def test_a_hook_of_the_module_that_edits_what_the_optimizer_gets_is_named() -> None:
    def before(self: Any, optimizer: Any) -> None:
        RLLightningModule.on_before_optimizer_step(self, optimizer)
        louder(self)

    base = tiny_module(minibatches_per_rollout=2, max_tokens_per_microbatch=60)
    module = type("Mine", (RLLightningModule,), {"on_before_optimizer_step": before})(**base.options)
    found = culprits(module=module)
    assert found and {one for few in found.values() for one in few} == {"module Mine.on_before_optimizer_step"}


def test_a_hook_that_trims_the_plan_is_named() -> None:
    def trim(_self: Any, trainer: Any, module: Any, *_: Any) -> None:
        current = module.run.current
        if current is not None:
            plan = current.plan
            short = tuple(step[:1] for step in plan.minibatches)
            module.run.current = dataclasses.replace(current, plan=dataclasses.replace(plan, minibatches=short))

    found = culprits(
        type("Trim", (Callback,), {"on_before_optimizer_step": trim})(),
        epochs_per_rollout=2,
        max_tokens_per_microbatch=24,
    )
    assert found and {one for few in found.values() for one in few} == {"callback Trim.on_before_optimizer_step"}


def rows_without(name: str, row: Callable[[Any], dict[str, float]]) -> Callable[[Any], dict[str, float]]:
    return lambda log: {key: figure for key, figure in row(log).items() if key != name}


@pytest.mark.parametrize("name", ["kl/rollout", "time/update", "loss/policy"])
def test_a_figure_that_never_reaches_the_loggers_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loggers import CSVLogger

    monkeypatch.setattr(MetricLog, "row", rows_without(name, MetricLog.row))
    audit = SignalAudit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tiny_module(), callbacks=[audit], data=tiny_prompts(8, 4), logger=CSVLogger("."))
    assert {(finding.check, finding.culprit) for finding in audit.findings} == {("logged_metrics", f"metric {name}")}


class DropSome(RLCallback):
    """Keeps every second group, and asks for others in their place."""

    name, max_rounds = "drop_some", 3

    @override
    def keep_groups(self, rollout: Any) -> Tensor:
        return rollout.groups % 2 == 0


@pytest.mark.parametrize(
    "name", ["groups/sampled", "groups/filtered", "engine/aborted", "reward/failed", "reward_failed/parity_reward"]
)
def test_a_count_of_the_sampling_that_is_off_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Sampler.fill_groups

    def miscount(self: Any, *arguments: Any, **keywords: Any) -> Any:
        scored = fill(self, *arguments, **keywords)
        more = Stat.single(scored.stats[name].value() + 1).sum()
        return scored._replace(stats={**scored.stats, name: more})

    monkeypatch.setattr(Sampler, "fill_groups", miscount)
    found = culprits(DropSome(), rollouts=2)
    assert found == {"logged_metrics": {f"metric {name}"}}


def test_the_counts_of_the_sampling_are_right_without_a_fault() -> None:
    assert culprits(DropSome(), rollouts=2) == {}


def fail_on_some(completions: Any, **_: Any) -> list[float | None]:
    return [math.nan if row % 4 == 0 else None if row % 4 == 1 else float(row) for row in range(len(completions))]


def fail_on_all(**_: Any) -> list[float]:
    raise ValueError


@pytest.mark.parametrize("advantages", ["grpo", "remax"])
def test_failures_of_rewards_are_counted_for_greedy_answers_too(advantages: str) -> None:
    rewards = {"some": fail_on_some, "all": (fail_on_all, 0.0), "parity": parity_reward}
    assert culprits(rollouts=2, rewards=rewards, advantages=advantages) == {}


class Figures(RLCallback):
    """Measures something of each microbatch."""

    name = "figures"

    def __init__(self, measure: Callable[[LossView], Stat]) -> None:
        self.measure = measure

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"figures/it": self.measure(view)}


def mean_of_means(view: LossView) -> Stat:
    return Stat.single(view.logprobs[view.valid_tokens].mean() if view.valid_tokens.any() else 0.0)


def mean_of_rows(view: LossView) -> Stat:
    return Stat.single((torch.where(view.valid_tokens, view.entropy, 0.0).sum(-1)).mean() / view.width)


def every_second_row(view: LossView) -> Stat:
    return Stat.of(view.logprobs[::2], view.valid_tokens[::2])


def whole(view: LossView) -> Stat:
    return Stat.of(view.logprobs, view.valid_tokens)


def good_tokens(view: LossView) -> Stat:
    return Stat.of(view.logprobs, view.valid_tokens & (view.require("advantages") > 0))


def a_constant(view: LossView) -> Stat:
    return Stat.single(0.2)


@pytest.mark.parametrize("measure", [mean_of_means, mean_of_rows, every_second_row])
def test_a_figure_that_depends_on_microbatches_is_found(measure: Any) -> None:
    assert culprits(Figures(measure), rollouts=2) == {"metric_populations": {"callback figures.metrics"}}


@pytest.mark.parametrize("measure", [whole, good_tokens, a_constant])
def test_a_figure_of_any_tokens_is_legal(measure: Any) -> None:
    assert culprits(Figures(measure), rollouts=2) == {}


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
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    mean = state["mean"] = 0.9 * state.get("mean", 0.0) + weight.grad
                    weight.sub_(group["lr"] * (orthogonal(mean) if mean.dim() > 1 else mean.sign()))


class Lookahead(Optimizer):
    """Goes back to an average of its own every third step."""

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
    """A rule of its own, and an option that says so."""

    def __init__(self, groups: Any, lr: float = 1e-2) -> None:
        super().__init__(groups, lr=lr)
        self.defaults["centre"] = True


LEGAL: dict[str, Any] = {
    "muon-like": Orthogonal,
    "lookahead": Lookahead,
    "a subclass with an option": Centred,
    "a subclass that only looks": named(AdamW, step=lambda self, closure=None: AdamW.step(self, closure)),
    "foreach": partial(AdamW, lr=1e-2, foreach=True),
    "fused": partial(Adam, lr=1e-2, fused=True),
    "amsgrad": partial(AdamW, lr=1e-2, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", LEGAL.values(), ids=LEGAL)
def test_no_alarm_for_legal_optimizers(optimizer: Any) -> None:
    assert culprits(optimizer=optimizer, epochs_per_rollout=2, lr_scheduler=warmup_then_linear(4, 100)) == {}


def test_no_alarm_for_a_warm_up_that_begins_at_zero() -> None:
    def from_zero(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(step / 5, 1.0))

    assert culprits(lr_scheduler=from_zero, minibatches_per_rollout=1, max_tokens_per_microbatch=4096) == {}
