"""Reductions, and everything with a statistic of all ranks: the cut into ranks and the order of rows do not matter."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.lockstep import in_lockstep
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossView
from lightning_rl.signal.masked import GlobalSum, local_sum, whiten
from lightning_rl.signal.reductions import Reduction
from lightning_rl.signal.selection import GlobalConcat
from properties.batches import WITNESS, few, inserted, rows, some, twice, view_of_rows, views, without_columns
from properties.evaluation import Found, agree, evaluate, microbatch, signal_of
from properties.exports import ESTIMATOR_EXAMPLES, LOSS_EXAMPLES, REDUCTION_EXAMPLES

each = pytest.mark.parametrize("reduction", REDUCTION_EXAMPLES.values(), ids=REDUCTION_EXAMPLES)
PREPARING = [name for name, loss in LOSS_EXAMPLES.items() if loss.prepares]


def weights(reduction: Reduction, view: LossView, global_sum: GlobalSum = local_sum) -> Tensor:
    return reduction(view.valid_tokens, view.trained, view.groups, global_sum)


def dealt_by_group(view: LossView, hands: list[int]) -> list[LossView]:
    """The rows of three ranks: a group lies on one rank, and a rank may have nothing or nothing but padding."""
    rank_of = torch.tensor(hands)[view.groups]
    return [view.select(rank_of == rank) for rank in range(3)]


hands = st.lists(st.integers(0, 2), min_size=4, max_size=4)


@each
@given(view=views())
@some
def test_i_01_reductions_are_pure(reduction: Reduction, view: LossView) -> None:
    before = view.valid_tokens.clone(), view.trained.clone(), view.groups.clone()
    assert torch.equal(weights(reduction, view), weights(reduction, view))
    assert all(torch.equal(*pair) for pair in zip(before, (view.valid_tokens, view.trained, view.groups), strict=True))


@each
@given(view=views(), place=st.integers(0, 6))
@some
def test_i_03_masked_tokens_weigh_nothing_and_change_no_weight(
    reduction: Reduction, view: LossView, place: int
) -> None:
    found = weights(reduction, inserted(view, place))
    assert torch.equal(without_columns(found, place), weights(reduction, view))
    assert found.dtype == torch.float64 and not found[:, place : place + 2].any()


@each
@given(view=views(), seed=st.integers(0, 99))
@some
def test_i_07_rows_may_come_in_any_order(reduction: Reduction, view: LossView, seed: int) -> None:
    order = torch.randperm(len(view), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weights(reduction, view.select(order)), weights(reduction, view)[order])


@each
@given(given_rows=rows(kinds=["empty", "masked", "dropped", "padding"], most=3))
@few
def test_i_23_a_step_without_a_token_weighs_nothing(reduction: Reduction, given_rows: list) -> None:
    assert not weights(reduction, view_of_rows(given_rows)).any()


@each
@given(view=views())
@some
def test_i_27_a_batch_twice_over_weighs_half_each(reduction: Reduction, view: LossView) -> None:
    once = weights(reduction, view)
    assert_close(weights(reduction, twice(view)), torch.cat([once, once]) / 2, atol=1e-15, rtol=1e-15)


@each
@given(view=views(), dealt=hands)
@some
def test_i_05_ranks_together_weigh_as_one_does(reduction: Reduction, view: LossView, dealt: list[int]) -> None:
    parts = dealt_by_group(view, dealt)
    found = in_lockstep(*[lambda total, _, own=own: weights(reduction, own, total) for own in parts])
    whole = [weights(reduction, view)[torch.tensor(dealt)[view.groups] == rank] for rank in range(3)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, whole, strict=True))


@pytest.mark.parametrize("name", ESTIMATOR_EXAMPLES)
@given(view=views(), dealt=hands)
@some
def test_i_05_ranks_estimate_with_the_statistics_of_all(name: str, view: LossView, dealt: list[int]) -> None:
    estimator, parts = ESTIMATOR_EXAMPLES[name], dealt_by_group(view, dealt)
    found = in_lockstep(*[lambda total, _, own=own: estimator(signal_of(own, total)).advantages for own in parts])
    whole = estimator(signal_of(view)).advantages
    agree(found, [whole[torch.tensor(dealt)[view.groups] == rank] for rank in range(3)])


def on_a_rank(
    own: LossView, name: str, reduction: Reduction, global_sum: GlobalSum, global_concat: GlobalConcat
) -> Found:
    cut = [list(range(0, len(own), 2)), list(range(1, len(own), 2))]  # as many microbatches on every rank
    return evaluate(
        own, loss=LOSS_EXAMPLES[name], reduction=reduction, cut=cut, global_sum=global_sum, global_concat=global_concat
    )


@pytest.mark.parametrize("name", PREPARING)
@given(view=views(), dealt=hands, reduction=st.sampled_from(list(REDUCTION_EXAMPLES.values())))
@few
def test_i_05_ranks_train_as_one_does(name: str, reduction: Reduction, view: LossView, dealt: list[int]) -> None:
    apart = 3.0 * view.groups[:, None]  # the means of a rank are not those of the step
    view = view.replace(advantages=view.require("advantages") + apart, logprobs=view.logprobs - apart).sanitize()
    parts = dealt_by_group(view, dealt)
    found = in_lockstep(*[partial(on_a_rank, own, name, reduction) for own in parts])
    whole = evaluate(view, loss=LOSS_EXAMPLES[name], reduction=reduction)
    agree(torch.stack([rank.loss for rank in found]).sum(), whole.loss)
    for rank, own in enumerate(found):
        agree(own.gradients[0], whole.gradients[0][torch.tensor(dealt)[view.groups] == rank])


@pytest.mark.parametrize("name", [*PREPARING, *ESTIMATOR_EXAMPLES])
@pytest.mark.parametrize("nothing", ["no-rows", "all-masked", "padding"])
def test_i_15_a_rank_without_tokens_waits_for_nobody(name: str, nothing: str) -> None:
    idle = {
        "no-rows": WITNESS.select(torch.arange(0)),
        "padding": WITNESS.padding_rows(2),
        "all-masked": view_of_rows([("masked", 3, 0, False), ("empty", 3, 1, False)]),
    }[nothing]
    if name in ESTIMATOR_EXAMPLES:
        estimator = ESTIMATOR_EXAMPLES[name]
        ranks = in_lockstep(*[lambda t, _, own=own: estimator(signal_of(own, t)).advantages for own in (WITNESS, idle)])
        agree(ranks[0], estimator(signal_of(WITNESS)).advantages)
        return
    loss = LOSS_EXAMPLES[name]

    def prepare(own: LossView, global_sum: GlobalSum, global_concat: GlobalConcat) -> Tensor:
        pieces = [own.sanitize(), microbatch(own, [])[0].sanitize()]
        prepared = loss.prepare(pieces, global_sum, global_concat)
        assert prepared is not None
        return prepared[0]

    first, second = in_lockstep(partial(prepare, WITNESS), partial(prepare, idle))
    (alone,) = in_lockstep(partial(prepare, WITNESS))
    assert torch.equal(first, alone) and not second.any()


@given(view=views(), scale=st.sampled_from([-64.0, -0.5, 0.25, 1000.0]), shift=st.sampled_from([0.0, -3.0, 2.0**17]))
@some
def test_i_21_whitening_follows_scale_and_shift_in_float32(view: LossView, scale: float, shift: float) -> None:
    values, mask = torch.round(view.require("advantages") * 8).float(), view.valid_tokens  # exact after the shift
    expected = math.copysign(1, scale) * whiten(values, mask)
    assert_close(whiten(values * scale + shift, mask), expected, atol=1e-6, rtol=1e-6)
