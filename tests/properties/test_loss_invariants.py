"""Every exported policy loss through the real objective: which disturbances of a batch must change nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_rl import LossView
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction
from properties.batches import WITNESS, disturbed, few, inserted, joined, some, twice, views, without_columns
from properties.evaluation import agree, evaluate, prepared_view, same, tensor_versions
from properties.exports import LOSS_EXAMPLES, REDUCTION_EXAMPLES, quick

each = pytest.mark.parametrize("name", quick(LOSS_EXAMPLES))
every = pytest.mark.parametrize("name", LOSS_EXAMPLES)
reductions = st.sampled_from(list(REDUCTION_EXAMPLES.values()))
PLACED = ("clip_cov", "clip_cov-some")  # draw tokens by sample and position: only padding behind leaves the draw alone


@each
@given(view=views())
@few
def test_i_01_purity(name: str, view: LossView) -> None:
    loss, before = LOSS_EXAMPLES[name], [tensor.clone() for _, tensor in view.tensors()]
    versions = tensor_versions(view)
    first, second = evaluate(view, loss=loss), evaluate(view, loss=loss)
    assert same(first, second)
    assert tensor_versions(view) == versions
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(view.tensors(), before, strict=True))


@each
@given(view=views())
@some
def test_i_02_masked_values_take_no_part(name: str, view: LossView) -> None:
    loss = LOSS_EXAMPLES[name]
    assert same(evaluate(disturbed(view), loss=loss), evaluate(view, loss=loss))


@every
@given(view=views(), poison=st.sampled_from([math.nan, math.inf, -math.inf]))
@some
def test_i_02b_poison_at_masked_tokens_reaches_nothing(name: str, view: LossView, poison: float) -> None:
    loss = LOSS_EXAMPLES[name]
    found = evaluate(disturbed(view, poison), loss=loss)
    assert all(gradient.isfinite().all() for gradient in found.gradients) and found.loss.isfinite()
    assert same(found, evaluate(view, loss=loss))


@each
@given(view=views(), place=st.integers(0, 6), reduction=reductions)
@some
def test_i_03_masked_tokens_may_be_inserted(name: str, view: LossView, place: int, reduction: Reduction) -> None:
    loss, place = LOSS_EXAMPLES[name], view.width if name in PLACED else place
    plain = evaluate(view, loss=loss, reduction=reduction)
    wider = evaluate(inserted(view, place), loss=loss, reduction=reduction)
    agree(wider.loss, plain.loss)
    agree(wider.metrics, plain.metrics)
    for ours, theirs in zip(wider.gradients, plain.gradients, strict=True):
        agree(without_columns(ours, place), theirs)
        assert not ours[:, place : place + 2].any()


@st.composite
def cut_views(draw: st.DrawFn) -> tuple[LossView, list[list[int]]]:
    """A view, and its trained rows dealt out to up to four microbatches, some of which may get none."""
    view = draw(views(most=8))
    rows = view.trained.nonzero()[:, 0].tolist()
    cut: list[list[int]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for row in draw(st.permutations(rows)):
        cut[draw(st.integers(0, len(cut) - 1))].append(row)
    return view, cut


@every
@given(given_view=cut_views(), reduction=reductions)
@some
def test_i_04_any_cut_into_microbatches(
    name: str, reduction: Reduction, given_view: tuple[LossView, list[list[int]]]
) -> None:
    view, cut = given_view
    loss = LOSS_EXAMPLES[name]
    whole = evaluate(view, loss=loss, reduction=reduction)
    agree(evaluate(view, loss=loss, reduction=reduction, cut=cut), whole)


@pytest.mark.parametrize("name", [name for name, loss in LOSS_EXAMPLES.items() if vars(type(loss)).get("token_wise")])
@given(view=views())
@some
def test_i_04_what_is_token_wise_may_be_cut_within_rows(name: str, view: LossView) -> None:
    loss = LOSS_EXAMPLES[name]
    agree(evaluate(view, loss=loss, by_token=True), evaluate(view, loss=loss))


@each
@given(view=views(), seed=st.integers(0, 99))
@some
def test_i_07_rows_may_come_in_any_order(name: str, view: LossView, seed: int) -> None:
    loss = LOSS_EXAMPLES[name]
    order = torch.randperm(len(view), generator=torch.Generator().manual_seed(seed))
    plain, moved = evaluate(view, loss=loss), evaluate(view.select(order), loss=loss)
    agree((moved.loss, moved.parts, moved.metrics), (plain.loss, plain.parts, plain.metrics))
    agree(moved.gradients, tuple(gradient[order] for gradient in plain.gradients))


@each
@given(view=views(), columns=st.integers(0, 3), rows=st.integers(0, 3))
@some
def test_i_14_padding_changes_nothing(name: str, view: LossView, columns: int, rows: int) -> None:
    loss, number, width = LOSS_EXAMPLES[name], len(view), view.width
    wide = view.fit_width(width + columns)
    padded = evaluate(joined(wide, wide.padding_rows(rows)), loss=loss)
    plain = evaluate(view, loss=loss)
    agree((padded.loss, padded.parts, padded.metrics), (plain.loss, plain.parts, plain.metrics))
    for ours, theirs in zip(padded.gradients, plain.gradients, strict=True):
        agree(ours[:number, :width], theirs)
        assert not ours[number:].any() and not ours[:, width:].any()


@every
def test_i_09_padding_rows_have_every_field_and_every_metric(name: str) -> None:
    loss = LOSS_EXAMPLES[name]
    view = prepared_view(WITNESS, loss)
    padding = view.padding_rows(2)
    assert [field for field, _ in padding.tensors()] == [field for field, _ in view.tensors()]
    assert {field: tensor.dtype for field, tensor in padding.tensors()} == {f: t.dtype for f, t in view.tensors()}
    empty = loss.metrics(padding)
    assert empty.keys() == loss.metrics(view).keys()
    assert all(stat.moments[0] == 0 for stat in empty.values())
    assert loss(padding).shape == (2, view.width)


@each
@given(view=views())
@few
def test_i_17_what_ran_before_does_not_matter(name: str, view: LossView) -> None:
    loss = LOSS_EXAMPLES[name]
    torch.manual_seed(0)
    before = evaluate(view, loss=loss)
    other = view.replace(logprobs=view.logprobs - 1.0, sample_ids=view.sample_ids + 3)
    evaluate(other, loss=loss, cut=[[0], []])
    torch.manual_seed(1)
    torch.rand(3)
    assert same(evaluate(view, loss=loss), before)


@each
@given(given_view=cut_views())
@few
def test_i_18_gradients_of_parts_add_up(name: str, given_view: tuple[LossView, list[list[int]]]) -> None:
    view, cut = given_view
    loss = LOSS_EXAMPLES[name]
    view = prepared_view(view, loss)
    weights = REDUCTION_EXAMPLES["token_mean"](view.valid_tokens, view.trained, view.groups, local_sum)

    def share(rows: list[int]) -> torch.Tensor:
        index = torch.tensor(rows, dtype=torch.int64)
        return (weights * loss(leaf) * torch.isin(torch.arange(len(view)), index)[:, None]).sum()

    leaf = view.replace(logprobs=view.logprobs.detach().requires_grad_())
    for rows in cut:
        share(rows).backward()  # accumulates
    (whole,) = torch.autograd.grad(share([row for rows in cut for row in rows]), leaf.logprobs)
    assert leaf.logprobs.grad is not None
    assert_close(leaf.logprobs.grad, whole, atol=1e-12, rtol=0)


@each
@given(view=views(), reduction=reductions)
@few
def test_i_27_a_batch_twice_over_has_the_same_mean(name: str, reduction: Reduction, view: LossView) -> None:
    loss = LOSS_EXAMPLES[name]
    chosen = prepared_view(view, loss)  # the selection is a function of the step; here it stays what it was
    plain = evaluate(chosen, loss=loss, reduction=reduction)
    double = evaluate(twice(chosen), loss=loss, reduction=reduction)
    agree((double.loss, double.parts), (plain.loss, plain.parts))
    for ours, theirs in zip(double.gradients, plain.gradients, strict=True):
        agree(ours, torch.cat([theirs, theirs]) / 2)
