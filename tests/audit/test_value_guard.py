"""Edits on audited rollouts: by any means, of weights, and hooks on gradients, with their author and field."""

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, callback_of, fit, ragged_rollout, tiny_module, tiny_prompts, view_of_rollout
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from typing_extensions import override

from lightning_rl import GRPO, LossView, Rollout, Stat
from lightning_rl.advantages.estimator import Advantages, RewardSignal
from lightning_rl.algorithm import Algorithm
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.corrections import Corrections, LossTerm, RLCallback
from lightning_rl.corrections.trace import StepTrace
from lightning_rl.losses import ClippedSurrogate
from lightning_rl.policy import Outputs, make_plan
from lightning_rl.recording import RolloutRecorder
from lightning_rl.reporting import SampleTable
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.testing.properties.value_guard import Seal, ValueGuard
from lightning_rl.update import StepWeights, accumulate_gradient, from_table
from lightning_rl.utils.mutation_guard import EditError

FIELD = "old_logprobs"
Edit = Callable[[Rollout], None]


def guarded(*callbacks: RLCallback, active: bool = True) -> Corrections:
    """Return corrections as an audit sets them up."""
    corrections = Corrections(callbacks)
    corrections.guard = guard = ValueGuard()
    guard.active = active
    return corrections


def guarded_algorithm(*callbacks: RLCallback, **parts: Any) -> Algorithm:
    return an_algorithm(**parts).replace(corrections=guarded(*callbacks))


def through_data(rows: Rollout) -> None:
    getattr(rows, FIELD).data.mul_(2.0)


def through_a_pointer(rows: Rollout) -> None:
    ctypes.c_float.from_address(getattr(rows, FIELD).data_ptr()).value = -5.0


def by_another_tensor(rows: Rollout) -> None:
    object.__setattr__(rows, FIELD, getattr(rows, FIELD) * 2)


def through_numpy(rows: Rollout) -> None:
    getattr(rows, FIELD).numpy()[0] = 7.0


def by_other_memory(rows: Rollout) -> None:
    getattr(rows, FIELD).data = getattr(rows, FIELD) * 2


WAYS = [through_data, through_numpy, through_a_pointer, by_other_memory, by_another_tensor]
way = pytest.mark.parametrize("edit", WAYS, ids=lambda edit: edit.__name__)


def finite_rollout() -> Rollout:
    return ragged_rollout().map(
        lambda tensor, _axis, _pad: tensor.nan_to_num() if tensor.is_floating_point() else tensor
    )


def a_view() -> LossView:
    rollout = finite_rollout()
    return view_of_rollout(rollout, torch.full(rollout.response_ids.shape, -1.0, requires_grad=True))


@way
def test_the_callback_that_edits_a_rollout_is_named_with_the_field(edit: Edit) -> None:
    def bonus(seen: Rollout) -> Tensor:
        edit(seen)
        return torch.zeros(len(seen))

    corrections = guarded(
        callback_of("alpha", reward_bonus=lambda s: s.rewards), callback_of("vandal", reward_bonus=bonus)
    )
    with pytest.raises(EditError, match=rf"^reward_bonus of vandal wrote in place to {FIELD}: return a new"):
        corrections.reward_bonus(finite_rollout())


@pytest.mark.parametrize("method", ["sequence_mask", "token_weight", "loss_term", "metrics"])
def test_the_callback_that_edits_the_view_of_a_microbatch_is_named(method: str) -> None:
    def contribute(view: LossView) -> Any:
        through_data(view)
        return {
            "sequence_mask": torch.ones(len(view), dtype=torch.bool),
            "token_weight": torch.ones(view.valid_tokens.shape),
            "loss_term": None,
            "metrics": {"vandal/zero": Stat.of(view.rewards)},
        }[method]

    algorithm = guarded_algorithm(callback_of("vandal", **{method: contribute}))
    with pytest.raises(EditError, match=rf"^{method} of vandal wrote in place to {FIELD}:"):
        algorithm.microbatch_loss(
            a_view(), lambda weigh: weigh(torch.ones(12, 7).bool(), torch.ones(12).bool(), torch.zeros(12), local_sum)
        )


def test_a_loss_that_edits_while_it_prepares_is_named() -> None:

    class Preparing(ClippedSurrogate):
        @override
        def prepare(self, views: Sequence[LossView], global_sum: Any, global_concat: Any) -> None:
            views[0].require("advantages").data.zero_()

    rollout = finite_rollout()
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=4096)
    outputs = Outputs(torch.full(rollout.response_ids.shape, -1.0, requires_grad=True), torch.ones(12, 7), None)
    with pytest.raises(EditError, match=r"^prepare of the loss Preparing wrote in place to advantages"):
        accumulate_gradient(
            rollout, plan.step(0), from_table(outputs), guarded_algorithm(loss=Preparing()), backward=lambda _loss: None
        )


def test_a_rollout_that_is_not_audited_is_compared_by_version() -> None:
    def editing(edit: Callable[[Tensor], object]) -> Corrections:
        def bonus(seen: Rollout) -> Tensor:
            edit(seen.rewards)
            return torch.zeros(len(seen))

        return guarded(callback_of("vandal", reward_bonus=bonus), active=False)

    editing(lambda rewards: rewards.data.zero_()).reward_bonus(finite_rollout())
    with pytest.raises(EditError, match=r"^reward_bonus of vandal wrote in place to rewards"):
        editing(lambda rewards: rewards.zero_()).reward_bonus(finite_rollout())


# Gradients of what is shown.


def a_view_with_gradients() -> LossView:
    """Every tensor of a view that can have a gradient has one, as an output of a policy and no leaf."""
    rollout = finite_rollout()
    made = [torch.full(rollout.response_ids.shape, -1.0, requires_grad=True) * 1.0 for _ in range(3)]
    view = view_of_rollout(rollout, made[0])
    return view.replace(entropy=made[1], current_values=made[2], values=torch.zeros(12, 7), returns=torch.ones(12, 7))


GRADIENT_WAYS: dict[str, Callable[[Tensor], object]] = {
    "register_hook": lambda tensor: tensor.register_hook(lambda gradient: gradient * 0.5),
    "register_hook that only looks": lambda tensor: tensor.register_hook(lambda _: None),
    "hook of the node": lambda tensor: tensor.grad_fn.register_hook(lambda *_: (None,)),  # pyrefly: ignore[missing-attribute]
    "multi-grad hook": lambda tensor: register_multi_grad_hook((tensor,), lambda _: None, mode="any"),
    "detach_": lambda tensor: tensor.detach_(),
}


def loss_of_view(view: LossView, *callbacks: RLCallback, **parts: Any) -> Tensor:
    def weigh(reduction: Reduction) -> Tensor:
        return reduction(view.valid_tokens, view.trained, view.groups, local_sum)

    return guarded_algorithm(*callbacks, **parts).microbatch_loss(view, weigh).total


@pytest.mark.parametrize(
    ("method", "field", "way"),
    [
        *(("loss_term", "logprobs", way) for way in GRADIENT_WAYS),
        *(("loss_term", field, "register_hook") for field in ("entropy", "current_values")),
        *((method, "logprobs", "register_hook") for method in ("token_mask", "metrics")),
    ],
)
def test_the_callback_that_hangs_a_hook_on_a_gradient_is_named(method: str, field: str, way: str) -> None:
    def contribute(view: LossView) -> Any:
        GRADIENT_WAYS[way](getattr(view, field))
        given = {"token_mask": view.valid_tokens, "metrics": {"vandal/zero": Stat.of(view.rewards)}}
        return given.get(method, LossTerm(per_token=view.logprobs, coef=1.0))

    with pytest.raises(EditError, match=rf"^{method} of vandal .*the gradient of {field}.*: return a new"):
        loss_of_view(a_view_with_gradients(), callback_of("vandal", **{method: contribute}))


def test_a_loss_that_hangs_a_hook_on_a_gradient_is_named() -> None:
    class Halving(ClippedSurrogate):
        @override
        def __call__(self, view: LossView) -> Tensor:
            view.logprobs.register_hook(lambda gradient: gradient * 0.5)
            return super().__call__(view)

    with pytest.raises(EditError, match=r"^the loss Halving .*the gradient of logprobs.*: return a new tensor"):
        loss_of_view(a_view_with_gradients(), loss=Halving())


def test_terms_of_their_own_may_hang_hooks_on_what_they_made_and_look_at_gradients() -> None:
    looked = list[Tensor]()

    def term(view: LossView) -> LossTerm:
        view.logprobs.retain_grad()  # a copy, which changes nothing
        looked.append(view.logprobs)
        own = view.logprobs * 2.0
        own.register_hook(lambda gradient: gradient * 0.5)
        return LossTerm(per_token=own, coef=1.0)

    loss = loss_of_view(a_view_with_gradients(), callback_of("own", loss_term=term))
    loss.backward()
    assert looked[0].grad is not None and looked[0].grad.abs().sum() > 0


class Late(RLCallback):
    """Keeps the view of a microbatch, and halves its gradient from a hook of Lightning."""

    name = "late"

    @override
    def token_mask(self, view: LossView) -> Tensor:
        self.kept = view
        return torch.ones_like(view.valid_tokens)

    @override
    def on_before_backward(self, *_: Any, **__: Any) -> None:
        self.kept.logprobs.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_on_a_kept_view_is_found_after_its_backward(first: bool) -> None:
    callbacks = [Late(), SignalAudit(1)]
    message = r"^code that kept the view until the backward, .*, registered a hook on the gradient of logprobs"
    with pytest.raises(EditError, match=message):
        fit(tiny_module(), callbacks=callbacks if first else callbacks[::-1], data=tiny_prompts(4))


@pytest.mark.parametrize("field", ["scores", "groups"])
def test_an_estimator_that_edits_what_it_sees_is_named(field: str) -> None:

    class Shaping(type(GRPO())):
        @override
        def __call__(self, signal: RewardSignal) -> Advantages:
            values = getattr(signal, field).numpy()
            values[-1] = values[-1] == 0
            return super().__call__(signal)

    with pytest.raises(EditError, match=rf"^the estimator Shaping wrote in place to .*{field}"):
        estimate_signal(finite_rollout(), Shaping(), guarded())


def test_a_reduction_that_edits_what_it_sees_is_named() -> None:

    def sorting(valid: Tensor, trained: Tensor, groups: Tensor, global_sum: Any) -> Tensor:
        groups.data.fill_(0)
        return valid.float()

    rollout = finite_rollout()
    microbatches = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=4096).step(0)
    with pytest.raises(EditError, match=r"^the reduction sorting wrote in place to groups: return a new tensor"):
        StepWeights(rollout, microbatches, local_sum, guarded()).of(sorting, microbatches[0])


class Observer(RLCallback):
    """Edits what one of the observing methods is shown."""

    name = "observer"

    def __init__(self, method: str, edit: Callable[..., None]) -> None:
        self.method, self.edit = method, edit

    @override
    def observe(self, rollout: Rollout) -> None:
        self._look("observe", rollout)

    @override
    def observe_generated(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._look("observe_generated", pairs)

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[Any]) -> None:
        self._look("observe_rewards", rollout, calls)

    @override
    def observe_step(self, trace: StepTrace) -> None:
        self._look("observe_step", trace)

    def _look(self, method: str, *shown: Any) -> None:
        if method == self.method:
            self.edit(*shown)


OBSERVERS: list[tuple[str, Callable[..., None], str]] = [
    ("observe_generated", lambda pairs: pairs[1][1].logprobs.data.zero_(), "logprobs of sample 1"),
    ("observe_step", lambda trace: trace.microbatches[0].gradient.numpy().fill(0), "gradient of microbatch 0"),
]


@pytest.mark.parametrize(("method", "edit", "what"), OBSERVERS, ids=[f"{m}-{w}" for m, _, w in OBSERVERS])
def test_an_observer_that_edits_what_it_is_shown_is_named(method: str, edit: Callable[..., None], what: str) -> None:
    with pytest.raises(EditError, match=rf"^{method} of observer wrote in place to {what}"):
        fit(tiny_module(), callbacks=[Observer(method, edit), SignalAudit(1)], data=tiny_prompts(4))


WEIGHT_WAYS: dict[str, Callable[[Tensor], object]] = {
    "through data": lambda weight: weight.data.mul_(0.9),
    "by other data": lambda weight: setattr(weight, "data", weight.data.clone()),
    "by a pointer": lambda weight: setattr(ctypes.c_float.from_address(weight.data_ptr()), "value", 7.0),
}
CONTRIBUTED: dict[str, Callable[[Any], Any]] = {
    "reward_bonus": lambda rollout: torch.zeros(len(rollout)),
    "loss_term": lambda view: LossTerm(per_token=view.logprobs * 0.0, coef=1.0),
    "observe_step": lambda _: None,
}


def vandal_of(method: str, way: str, module: Any) -> RLCallback:
    def contribute(seen: Any) -> Any:
        WEIGHT_WAYS[way](next(iter(module.policy.parameters())))
        return CONTRIBUTED[method](seen)

    return callback_of("vandal", **{method: contribute})


WAYS_AND_METHODS = [
    *(("loss_term", way) for way in WEIGHT_WAYS),
    ("reward_bonus", "through data"),
    ("observe_step", "through data"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "way"), WAYS_AND_METHODS)
def test_the_callback_that_writes_to_the_weights_of_the_policy_is_named(method: str, way: str) -> None:
    module, audit = tiny_module(), SignalAudit(1, checks=["quiet_hooks"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, callbacks=[vandal_of(method, way, module), audit], data=tiny_prompts(4))
    found = [finding for finding in audit.findings if finding.expected.startswith("weights")]
    assert {finding.culprit for finding in found} == {f"callback vandal.{method}"}


def test_observers_of_the_library_edit_nothing(tmp_path: Path) -> None:
    watched = list[str]()
    for method in ("observe_generated", "observe_step"):
        user = Observer(method, lambda *_: watched.append("called"))
        own = [SignalAudit(1), SignalLedger(), RolloutRecorder(tmp_path / method, 1), SampleTable(1)]
        fit(tiny_module(), callbacks=[user, *own], data=tiny_prompts(8, 4), default_root_dir=tmp_path)
    assert len(watched) >= 4


def test_a_context_of_the_forward_that_edits_its_rows_is_named() -> None:
    @contextmanager
    def entering(rows: Rollout) -> Iterator[None]:
        yield
        rows.response_ids.data.zero_()

    corrections = guarded(callback_of("context", forward_context=entering))
    with pytest.raises(EditError, match=r"^forward_context of context wrote in place to response_ids"):  # noqa: SIM117
        with corrections.forward_context(finite_rollout()):
            pass


def test_every_edited_field_is_named_whatever_its_type() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    fields = [
        ("half", torch.tensor([1.5, torch.nan], dtype=torch.bfloat16)),
        ("mask", torch.tensor([True, False])),
        ("part", whole[:, :3]),
        ("twin", whole[:, :3]),
        ("empty", torch.zeros(0, 3)),
    ]
    seal = Seal(fields)
    assert seal.changes(fields) == []
    fields[0][1].data[0] = 2.0
    fields[1][1].data[1] = True
    assert seal.changes(fields) == ["half", "mask"]
    changed = [*fields[:3], ("twin", whole + 1), ("more", whole)]
    assert seal.changes(changed) == ["half", "mask", "twin", "empty", "more"]
