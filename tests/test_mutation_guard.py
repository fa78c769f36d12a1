"""Edits: every write in place to a shown tensor is found by its version, in every run, with its author and field."""

import copy
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.support import (
    an_algorithm,
    callback_of,
    differing,
    fit,
    ragged_rollout,
    tiny_module,
    tiny_prompts,
    view_of_rollout,
)
from torch import Tensor
from typing_extensions import override

from lightning_rl import GRPO, LossView, Rollout, Stat, ValueLoss
from lightning_rl.advantages.estimator import Advantages, RewardSignal
from lightning_rl.corrections import Corrections, LossTerm, RLCallback
from lightning_rl.corrections.call_user import call_user
from lightning_rl.losses import ClippedSurrogate
from lightning_rl.policy import Outputs, make_plan
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.update import StepWeights, accumulate_gradient, from_table
from lightning_rl.utils.mutation_guard import EditError, changed_entries, copy_plain, same_plain

FIELD = "old_logprobs"
Edit = Callable[[Rollout], None]


def in_place(rows: Rollout) -> None:
    getattr(rows, FIELD).mul_(2.0)


def through_a_view(rows: Rollout) -> None:
    getattr(rows, FIELD)[0, :1] = 3.0


def by_another_tensor(rows: Rollout) -> None:
    object.__setattr__(rows, FIELD, getattr(rows, FIELD) * 2)


def by_taking_it_away(rows: Rollout) -> None:
    object.__setattr__(rows, FIELD, None)


WAYS = [in_place, through_a_view, by_another_tensor, by_taking_it_away]
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

    corrections = Corrections(
        [callback_of("alpha", reward_bonus=lambda s: s.rewards), callback_of("vandal", reward_bonus=bonus)]
    )
    with pytest.raises(EditError, match=rf"^reward_bonus of vandal wrote in place to {FIELD}: return a new"):
        corrections.reward_bonus(finite_rollout())


@pytest.mark.parametrize("method", ["sequence_mask", "token_weight", "loss_term", "metrics"])
def test_the_callback_that_edits_the_view_of_a_microbatch_is_named(method: str) -> None:
    def contribute(view: LossView) -> Any:
        in_place(view)
        return {
            "sequence_mask": torch.ones(len(view), dtype=torch.bool),
            "token_weight": torch.ones(view.valid_tokens.shape),
            "loss_term": None,
            "metrics": {"vandal/zero": Stat.of(view.rewards)},
        }[method]

    algorithm = an_algorithm([callback_of("vandal", **{method: contribute})])
    with pytest.raises(EditError, match=rf"^{method} of vandal wrote in place to {FIELD}:"):
        algorithm.microbatch_loss(
            a_view(), lambda weigh: weigh(torch.ones(12, 7).bool(), torch.ones(12).bool(), torch.zeros(12), local_sum)
        )


def test_a_loss_that_edits_the_view_is_named() -> None:

    class Careful(ClippedSurrogate):
        @override
        def __call__(self, view: LossView) -> Tensor:
            in_place(view)
            return torch.zeros_like(view.logprobs)

    rows = a_view()
    with pytest.raises(EditError, match=rf"^the loss Careful wrote in place to {FIELD}: return a new tensor"):
        an_algorithm(loss=Careful()).microbatch_loss(
            rows, lambda weigh: weigh(rows.valid_tokens, rows.trained, rows.groups, local_sum)
        )


def test_a_loss_that_edits_while_it_prepares_is_named() -> None:

    class Preparing(ClippedSurrogate):
        @override
        def prepare(self, views: Sequence[LossView], global_sum: Any, global_concat: Any) -> None:
            views[0].require("advantages").zero_()

    rollout = finite_rollout()
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=4096)
    outputs = Outputs(torch.full(rollout.response_ids.shape, -1.0, requires_grad=True), torch.ones(12, 7), None)
    with pytest.raises(EditError, match=r"^prepare of the loss Preparing wrote in place to advantages"):
        accumulate_gradient(
            rollout, plan.step(0), from_table(outputs), an_algorithm(loss=Preparing()), backward=lambda _loss: None
        )


def loss_of_view(view: LossView, **parts: Any) -> Tensor:
    def weigh(reduction: Reduction) -> Tensor:
        return reduction(view.valid_tokens, view.trained, view.groups, local_sum)

    return an_algorithm(**parts).microbatch_loss(view, weigh).total


def test_metrics_of_a_loss_and_a_value_loss_that_edit_are_named() -> None:
    class Measuring(ClippedSurrogate):
        @override
        def metrics(self, view: LossView) -> dict[str, Stat]:
            in_place(view)
            return super().metrics(view)

    class Scaling(ValueLoss):
        @override
        def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
            returns *= 0.5
            return super().__call__(values, old_values, returns)

    with pytest.raises(EditError, match=rf"^metrics of the loss Measuring wrote in place to {FIELD}: return a new"):
        loss_of_view(a_view(), loss=Measuring())
    shape = a_view().valid_tokens.shape
    values = {"current_values": torch.ones(shape), "values": torch.zeros(shape), "returns": torch.ones(shape)}
    with pytest.raises(EditError, match=r"^the value loss Scaling wrote in place to returns: return a new"):
        loss_of_view(a_view().replace(**values), value_loss=Scaling())


@pytest.mark.parametrize("field", ["scores", "groups"])
def test_an_estimator_that_edits_what_it_sees_is_named(field: str) -> None:

    class Shaping(type(GRPO())):
        @override
        def __call__(self, signal: RewardSignal) -> Advantages:
            getattr(signal, field)[-1] = 0
            return super().__call__(signal)

    with pytest.raises(EditError, match=rf"^the estimator Shaping wrote in place to .*{field}"):
        estimate_signal(finite_rollout(), Shaping(), Corrections())


def test_a_reduction_that_edits_what_it_sees_is_named() -> None:

    def sorting(valid: Tensor, trained: Tensor, groups: Tensor, global_sum: Any) -> Tensor:
        groups.fill_(0)
        return valid.float()

    rollout = finite_rollout()
    microbatches = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=4096).step(0)
    with pytest.raises(EditError, match=r"^the reduction sorting wrote in place to groups: return a new tensor"):
        StepWeights(rollout, microbatches, local_sum).of(sorting, microbatches[0])


OBSERVERS: list[tuple[str, Callable[..., None], str]] = [
    ("observe", lambda rollout: rollout.advantages.zero_(), "advantages"),
    ("observe_generated", lambda pairs: pairs[1][1].logprobs.zero_(), "logprobs of sample 1"),
    ("observe_rewards", lambda rollout: rollout.rewards.zero_(), "rewards"),
    ("observe_step", lambda trace: trace.microbatches[0].view.advantages.zero_(), "advantages of microbatch 0"),
    ("observe_step", lambda trace: trace.microbatches[0].gradient.fill_(0), "gradient of microbatch 0"),
]


@pytest.mark.parametrize(("method", "edit", "what"), OBSERVERS, ids=[f"{m}-{w}" for m, _, w in OBSERVERS])
def test_an_observer_that_edits_what_it_is_shown_is_named(method: str, edit: Callable[..., None], what: str) -> None:
    with pytest.raises(EditError, match=rf"^{method} of observer wrote in place to {what}"):
        fit(tiny_module(), callbacks=[callback_of("observer", **{method: edit})], data=tiny_prompts(4))


def test_a_context_of_the_forward_that_edits_its_rows_is_named() -> None:
    @contextmanager
    def entering(rows: Rollout) -> Any:
        yield
        rows.response_ids.zero_()

    corrections = Corrections([callback_of("context", forward_context=entering)])
    with pytest.raises(EditError, match=r"^forward_context of context wrote in place to response_ids"):  # noqa: SIM117
        with corrections.forward_context(finite_rollout()):
            pass


class Editing(RLCallback):
    """Edits in a hook of Lightning: the current rollout, or the copy that it was shown and kept."""

    name = "editing"

    def __init__(self, hook: str, *, current: bool) -> None:
        self.hook, self.current = hook, current

    @override
    def observe(self, rollout: Rollout) -> None:
        self.kept = rollout

    def _edit(self, module: Any) -> None:
        (module.run.progress.current.rollout if self.current else self.kept).require("advantages").mul_(0.5)

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.hook == "on_after_backward":
            self._edit(pl_module)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_end":
            self._edit(pl_module)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
def test_an_edit_of_the_held_rollout_ends_the_run_before_the_next_step(hook: str) -> None:
    message = r"^the held rollout was written to in place since it was finished: advantages; some callback keeps"
    with pytest.raises(EditError, match=message):
        fit(tiny_module(minibatches_per_rollout=2), callbacks=[Editing(hook, current=True)])
    edited, plain = tiny_module(minibatches_per_rollout=2), tiny_module(minibatches_per_rollout=2)
    fit(edited, callbacks=[Editing(hook, current=False)])
    fit(plain)
    assert differing(edited, plain) == []


def test_reading_in_every_way_is_no_edit() -> None:
    def reading(seen: Rollout) -> Tensor:
        getattr(seen, FIELD).numpy().sum()
        seen.sanitize().map(
            lambda tensor, _axis, _pad: tensor.clone().zero_() if tensor.dtype.is_floating_point else tensor
        )
        copy.deepcopy(seen).rewards.zero_()
        return seen.rewards

    rollout = finite_rollout()
    assert Corrections([callback_of("reading", reward_bonus=reading)]).reward_bonus(rollout) is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_gradient_mode_is_restored_after_user_code(enabled: bool) -> None:
    def switching(seen: Rollout) -> Tensor:
        torch.set_grad_enabled(not enabled)
        return seen.rewards

    with torch.set_grad_enabled(enabled):
        Corrections([callback_of("switching", reward_bonus=switching)]).reward_bonus(finite_rollout())
        assert torch.is_grad_enabled() == enabled


def test_a_loss_term_without_gradients_leaves_those_of_the_loss() -> None:
    def switching(view: LossView) -> LossTerm:
        torch.set_grad_enabled(False)
        return LossTerm(per_token=view.logprobs * 0.0, coef=1.0)

    view, plain = a_view(), a_view()
    loss_of_view(view, callbacks=[callback_of("a_switch", loss_term=switching)]).backward()
    loss_of_view(plain).backward()
    assert view.logprobs.grad is not None and plain.logprobs.grad is not None
    assert view.logprobs.grad.equal(plain.logprobs.grad)


def test_a_stop_iteration_of_user_code_is_an_error_that_names_the_function() -> None:
    def exhausted(seen: Rollout) -> Tensor:
        return next(iter([seen.rewards][1:]))

    with pytest.raises(RuntimeError, match=r"^expected no StopIteration to leave .*exhausted \(.*test_mutation_guard"):
        call_user("the estimator x", exhausted, finite_rollout(), shown=list)


def test_copies_of_plain_values_share_no_container() -> None:
    value = {"a": [1, (2, [3])], "b": {"c": {4}}, "d": torch.ones(2), "e": float("nan")}
    twin = copy_plain(value)
    assert same_plain(value, twin) and changed_entries(value, twin) == []
    twin["a"][1][1].append(5)
    twin["b"]["c"].add(6)
    twin["d"][0] = 2
    assert changed_entries(value, twin) == ["a", "b", "d"]
    assert value["a"] == [1, (2, [3])] and value["b"] == {"c": {4}}
