"""The pass before a step: once for each optimizer step, over all of its microbatches, without gradient."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, callback_of, differing, fit, ragged_rollout, tiny_module, tiny_policy
from torch import Tensor
from typing_extensions import override

from lightning_rl import KLCov, LossView, PolicyLoss, Reinforce, token_mean
from lightning_rl.distributed import Collectives
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.selection import GlobalConcat
from lightning_rl.update import StepGradient, accumulate_gradient


class Watching(PolicyLoss):
    """Remembers what it was asked, and marks each token with the number of its view."""

    def __init__(self) -> None:
        self.prepared: list[list[LossView]] = []
        self.given: list[Tensor | None] = []
        self.collectives: list[Any] = []

    @override
    def prepare(
        self, views: Sequence[LossView], global_sum: GlobalSum, global_concat: GlobalConcat
    ) -> Sequence[Tensor]:
        assert not torch.is_grad_enabled()
        self.prepared.append(list(views))
        self.collectives = [global_sum, global_concat]
        return [torch.full_like(view.logprobs, float(number)) for number, view in enumerate(views, 1)]

    @override
    def __call__(self, view: LossView) -> Tensor:
        assert torch.is_grad_enabled()
        self.given.append(view.prepared)
        return -view.require("advantages") * view.logprobs


def accumulate(loss: PolicyLoss, cut: list[list[int]], *callbacks: Any, **options: Any) -> tuple[StepGradient, int]:
    """One step over the ragged rollout; with how often the policy ran."""
    rollout = ragged_rollout()
    model = tiny_policy()
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    passes: list[bool] = []
    policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    step = accumulate_gradient(
        rollout,
        plan_of_rows(rollout, [cut]).step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm(callbacks, loss=loss, reduction=token_mean),
        **dict[str, Any](backward=lambda total: total.backward()) | options,
    )
    assert passes == sorted(passes), "the passes without gradient come first"
    return step, len(passes)


CUT = [[0, 1, 2, 3], [], [4, 5, 6, 7, 8, 9, 10, 11]]


def test_prepare_is_called_once_with_every_microbatch_and_without_gradient() -> None:
    loss = Watching()
    _, passes = accumulate(loss, CUT)
    assert len(loss.prepared) == 1 and passes == 6
    assert [view.sample_ids.tolist() for view in loss.prepared[0]] == [CUT[0], [-1], CUT[2]]
    assert not any(view.logprobs.requires_grad for view in loss.prepared[0])


def test_what_it_gives_comes_back_with_its_own_microbatch() -> None:
    loss = Watching()
    accumulate(loss, CUT)
    for number, (given, view) in enumerate(zip(loss.given, loss.prepared[0], strict=True), 1):
        assert given is not None
        assert torch.equal(given, torch.where(view.valid_tokens, float(number), 0.0))


def test_the_views_are_clean_and_have_the_outputs_of_the_policy() -> None:
    loss = Watching()
    accumulate(loss, CUT)
    for view in loss.prepared[0]:
        assert all(tensor.isfinite().all() for _, tensor in view.tensors() if tensor.is_floating_point())
        assert view.logprobs[view.valid_tokens].lt(0).all() and not view.logprobs[~view.valid_tokens].any()


def test_the_collectives_are_those_of_the_caller() -> None:
    loss, collectives = Watching(), Collectives()
    accumulate(loss, CUT, collectives=collectives)
    assert loss.collectives == [collectives.sum, collectives.concat]


def test_a_loss_that_does_not_prepare_costs_no_pass_and_gets_nothing() -> None:
    _, passes = accumulate(Reinforce(), CUT)
    assert passes == 3


def test_it_changes_nothing_in_the_step_itself() -> None:
    plain, watched = (accumulate(loss, CUT)[0] for loss in (Reinforce(), Watching()))
    assert torch.equal(plain.parts["loss/total"], watched.parts["loss/total"])
    assert plain.stats[0].keys() == watched.stats[0].keys() and len(plain.stats) == len(watched.stats)


def test_contexts_of_corrections_are_entered_for_the_pass_as_well() -> None:
    entered: list[int] = []

    def context(rows: Any) -> Any:
        entered.append(len(rows))
        return nullcontext()

    accumulate(Watching(), CUT, callback_of("context", forward_context=context))
    assert entered == [4, 1, 8] * 2


@pytest.mark.nightly
@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (2, 2)])
def test_a_fit_prepares_once_for_each_optimizer_step(minibatches: int, epochs: int) -> None:
    loss = Watching()
    trainer = fit(
        tiny_module(
            loss=loss, minibatches_per_rollout=minibatches, epochs_per_rollout=epochs, max_tokens_per_microbatch=40
        )
    )
    assert trainer.global_step == len(loss.prepared) >= 4 * minibatches * epochs
    assert any(len(views) > 1 for views in loss.prepared)
    assert len(loss.given) == sum(len(views) for views in loss.prepared)


def test_a_loss_of_the_library_trains_through_a_fit() -> None:
    prepared, plain = (tiny_module(loss=loss, minibatches_per_rollout=2) for loss in (KLCov(fraction=0.5), Reinforce()))
    fit(prepared, max_steps=4)
    fit(plain, max_steps=4)
    assert differing(prepared, plain)
