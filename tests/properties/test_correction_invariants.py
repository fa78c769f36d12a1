"""Every exported correction: what its contributions must not depend on, and what its metrics count."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import callback_of
from torch import Tensor

from lightning_rl import ClippedSurrogate, LossTerm, LossView, RLCallback, ValueLoss
from lightning_rl.callbacks import LinearLengthPenalty
from lightning_rl.corrections.rl_callback import CONTRIBUTIONS
from lightning_rl.signal.reductions import REDUCTIONS
from properties.batches import WITNESS, disturbed, few, inserted, joined, shuffled_tokens, some, views, without_columns
from properties.evaluation import agree, evaluate, provided, same, tensor_versions
from properties.exports import CORRECTIONS, FOLLOWS, corrections_with, leaf_of, name_of, quick_corrections

# With context= or turns=, LinearLengthPenalty counts masked tokens by its definition.
INSERTABLE = [LinearLengthPenalty(0.25) if isinstance(c, LinearLengthPenalty) else c for c in CORRECTIONS]
UPDATE = [name for name, entry in CONTRIBUTIONS.items() if entry.when == "update"]
AT_LOSS = ("sequence_mask", "token_mask", "token_weight", "loss_term")
BEFORE = ("reward_mask", "reward_bonus", "keep_groups", "exclude", "token_reward")
REJECTING = ("sequence_mask", "token_mask")
every = pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
each = pytest.mark.parametrize(
    "correction",
    [pytest.param(CORRECTIONS[one.values[0]], id=one.id, marks=one.marks) for one in quick_corrections()],
)
each_at_loss = pytest.mark.parametrize("correction", corrections_with(*AT_LOSS), ids=name_of)
each_rejecting = pytest.mark.parametrize("correction", corrections_with(*REJECTING), ids=name_of)
FOLLOWING = [term for term in corrections_with("loss_term") if FOLLOWS in term.reads_at_loss]
each_own_term = pytest.mark.parametrize(
    "correction", [term for term in corrections_with("loss_term") if term not in FOLLOWING], ids=name_of
)
TRUST_REGIONS = [
    term
    for term in corrections_with("loss_term")
    if leaf_of(term) == "logprobs" and not (term.chooses_rows or getattr(term, "unbiased", False))
]
"""Terms that are a distance; one weighed with the current policy has the gradient of the KL itself, which fades."""
REJECT = callback_of("aaa", sequence_mask=lambda view: view.sample_ids % 2 == 0)


def before_the_loss(correction: RLCallback, view: LossView) -> dict[str, Tensor]:
    """Return the contributions per rollout, 0 at invalid tokens."""
    found = {name: getattr(correction, name)(view) for name in BEFORE if name in correction.contributes}
    return {
        name: torch.where(view.valid_tokens, given, 0.0) if given.dim() == 2 else given for name, given in found.items()
    }


@each
@given(view=views())
@few
def test_i_01_purity(correction: RLCallback, view: LossView) -> None:
    before, versions = [tensor.clone() for _, tensor in view.tensors()], tensor_versions(view)
    first, second = before_the_loss(correction, view), before_the_loss(correction, view)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert same(evaluate(view, callbacks=[correction]), evaluate(view, callbacks=[correction]))
    assert tensor_versions(view) == versions
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(view.tensors(), before, strict=True))


@every
@given(view=views(), poison=st.sampled_from([None, math.nan, math.inf, -math.inf]))
@few
def test_i_02_masked_values_take_no_part_even_if_they_are_poison(
    correction: RLCallback, view: LossView, poison: float | None
) -> None:
    spoiled = disturbed(view, poison)
    ours, theirs = before_the_loss(correction, spoiled), before_the_loss(correction, view)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert same(evaluate(spoiled, callbacks=[correction]), evaluate(view, callbacks=[correction]))


@pytest.mark.parametrize("correction", INSERTABLE, ids=name_of)
@given(view=views(), place=st.integers(0, 6))
@few
def test_i_03_masked_tokens_may_be_inserted(correction: RLCallback, view: LossView, place: int) -> None:
    wider = inserted(view, place)
    ours, theirs = before_the_loss(correction, wider), before_the_loss(correction, view)
    agree({name: without_columns(one, place) if one.dim() == 2 else one for name, one in ours.items()}, theirs)
    found, plain = evaluate(wider, callbacks=[correction]), evaluate(view, callbacks=[correction])
    agree((found.loss, found.parts, found.metrics), (plain.loss, plain.parts, plain.metrics))
    agree(without_columns(found.gradients[0], place), plain.gradients[0])


@each_at_loss
@given(view=views(), size=st.integers(1, 3), reduction=st.sampled_from(list(REDUCTIONS.values())))
@some
def test_i_04_any_cut_into_microbatches(correction: RLCallback, reduction: Any, view: LossView, size: int) -> None:
    rows = view.trained.nonzero()[:, 0].tolist()[::-1]
    cut = [[], *(rows[start : start + size] for start in range(0, len(rows), size)), []]
    whole = evaluate(view, callbacks=[correction], reduction=reduction)
    agree(evaluate(view, callbacks=[correction], reduction=reduction, cut=cut), whole)


TOKEN_WISE = [one for one in corrections_with(*UPDATE) if vars(type(one)).get("token_wise") and one.token_wise]


@pytest.mark.parametrize("correction", TOKEN_WISE, ids=name_of)
@given(view=views())
@some
def test_i_04_what_is_token_wise_may_be_cut_within_rows(correction: RLCallback, view: LossView) -> None:
    agree(evaluate(view, callbacks=[correction], by_token=True), evaluate(view, callbacks=[correction]))


@each
@given(view=views(), seed=st.integers(0, 99))
@few
def test_i_07_rows_may_come_in_any_order(correction: RLCallback, view: LossView, seed: int) -> None:
    order = torch.randperm(len(view), generator=torch.Generator().manual_seed(seed))
    ours, theirs = before_the_loss(correction, view.select(order)), before_the_loss(correction, view)
    agree(ours, {name: one[order] for name, one in theirs.items()})
    found, plain = evaluate(view.select(order), callbacks=[correction]), evaluate(view, callbacks=[correction])
    agree((found.loss, found.metrics), (plain.loss, plain.metrics))
    agree(found.gradients, tuple(gradient[order] for gradient in plain.gradients))


@each_rejecting
@given(view=views())
@some
def test_i_12_a_share_counts_rows_or_tokens_before_anything_is_rejected(correction: RLCallback, view: LossView) -> None:
    plain, both = evaluate(view, callbacks=[correction]), evaluate(view, callbacks=[correction, REJECT])
    assert all(torch.equal(both.metrics[name], moments) for name, moments in plain.metrics.items())
    if "sequence_mask" in correction.contributes:
        rejected, population, name = ~correction.sequence_mask(view), view.trained, f"{correction.name}/rejected"
    else:
        rejected, population = ~correction.token_mask(view), view.valid_tokens
        name = f"{correction.name}/rejected_tokens"
    count, share = plain.metrics[name][:2].tolist()
    assert count == population.sum()
    assert share * count == pytest.approx(int(rejected[population].sum()))


@pytest.mark.parametrize("correction", corrections_with("metrics"), ids=name_of)
def test_i_12_its_metrics_are_of_valid_tokens_or_trained_rows_alone(correction: RLCallback) -> None:
    far = WITNESS.replace(rollout_logprobs=WITNESS.require("rollout_logprobs") + 0.9)  # every true ratio is below 1
    found = {name: stat.moments for name, stat in correction.metrics(far).items()}
    assert {int(moments[0]) for moments in found.values()} <= {int(far.valid_tokens.sum()), int(far.trained.sum())}
    ratios = (far.require("old_logprobs") - far.require("rollout_logprobs")).exp()[far.valid_tokens]
    if f"{correction.name}/ratio_max" in found and correction.contributes & {"token_mask"}:
        assert found[f"{correction.name}/ratio_max"][3] == ratios.max() < 1  # not the 1 of a masked token


@pytest.mark.parametrize("correction", corrections_with("keep_groups"), ids=name_of)
@given(view=views())
@some
def test_i_13_a_group_is_kept_or_filtered_as_a_whole(correction: RLCallback, view: LossView) -> None:
    kept = correction.keep_groups(view)
    for group in view.groups[view.real].unique():
        assert kept[view.groups == group].unique().numel() == 1


@each
@given(view=views(), columns=st.integers(0, 3), more=st.integers(0, 3))
@few
def test_i_14_padding_changes_nothing(correction: RLCallback, view: LossView, columns: int, more: int) -> None:
    wide, number = view.fit_width(view.width + columns), len(view)
    padded = joined(wide, wide.padding_rows(more))
    ours, theirs = before_the_loss(correction, padded), before_the_loss(correction, view)
    agree({name: one[:number, : view.width] if one.dim() == 2 else one[:number] for name, one in ours.items()}, theirs)
    found, plain = evaluate(padded, callbacks=[correction]), evaluate(view, callbacks=[correction])
    agree((found.loss, found.parts, found.metrics), (plain.loss, plain.parts, plain.metrics))
    agree(found.gradients[0][:number, : view.width], plain.gradients[0])
    assert not found.gradients[0][number:].any() and not found.gradients[0][:, view.width :].any()


@each_rejecting
@given(view=views())
@some
def test_i_22_a_decision_about_a_row_does_not_depend_on_the_order_of_its_tokens(
    correction: RLCallback, view: LossView
) -> None:
    moved, order = shuffled_tokens(view)
    if "sequence_mask" in correction.contributes:
        assert correction.sequence_mask(view).shape == (len(view),)
        assert torch.equal(correction.sequence_mask(moved), correction.sequence_mask(view))
    else:
        assert torch.equal(correction.token_mask(moved), correction.token_mask(view).gather(1, order))


@each
@given(view=views(kinds=["empty", "masked", "dropped", "padding"], most=3))
@few
def test_i_23_rows_without_a_token_add_nothing_and_break_nothing(correction: RLCallback, view: LossView) -> None:
    assert all(given.isfinite().all() for given in before_the_loss(correction, view).values())
    found = evaluate(view, callbacks=[correction])
    assert found.loss == 0 and not any(gradient.any() for gradient in found.gradients)


@each_own_term
@given(view=views())
@some
def test_i_28_the_total_is_linear_in_each_coefficient_with_the_logged_part_as_slope(
    correction: RLCallback, view: LossView
) -> None:
    coef = correction.loss_term(provided(view, correction)).coef
    plain = evaluate(view, callbacks=[correction], entropy_coef=0.3, value_loss=ValueLoss(coef=0.7))
    parts = plain.parts
    joint = parts["loss/policy"] + coef * parts[f"{correction.name}/loss"]
    agree(plain.loss, joint + 0.3 * parts["entropy/loss"] + 0.7 * parts["loss/value"])
    doubled = copy.copy(correction)
    option = "coef" if hasattr(correction, "coef") else "beta"
    setattr(doubled, option, getattr(correction, option) * 2)
    found = evaluate(view, callbacks=[doubled], entropy_coef=0.3, value_loss=ValueLoss(coef=0.7))
    agree(found.loss - plain.loss, coef * parts[f"{correction.name}/loss"])
    agree(evaluate(view, entropy_coef=1.3).loss - evaluate(view, entropy_coef=0.3).loss, parts["entropy/loss"])
    more, less = (evaluate(view, value_loss=ValueLoss(coef=coef)).loss for coef in (1.7, 0.7))
    agree(more - less, parts["loss/value"])


@each_own_term
def test_i_10b_each_term_by_itself_has_a_gradient(correction: RLCallback) -> None:
    mute = WITNESS.replace(advantages=torch.zeros_like(WITNESS.logprobs))
    found = evaluate(mute, callbacks=[correction], entropy_coef=0.0, value_loss=ValueLoss(coef=0.0))
    assert any(gradient[mute.valid_tokens].any() for gradient in found.gradients)
    assert found.parts[f"{correction.name}/loss"] != 0


@pytest.mark.parametrize("correction", FOLLOWING, ids=name_of)
@given(view=views())
@some
def test_i_28_a_term_that_follows_the_policy_loss_has_its_slope_at_each_token(
    correction: RLCallback, view: LossView
) -> None:
    """With the masks and weights of the others."""
    beside = [correction, REJECT, callback_of("bbb", token_weight=lambda view: 0.5 + view.require("values").abs())]
    found = evaluate(view, loss=ClippedSurrogate(), callbacks=beside, entropy_coef=0.0, value_loss=ValueLoss(coef=0.0))
    agree(found.gradients[3], found.gradients[0])
    agree(found.parts[f"{correction.name}/loss"], (found.gradients[0] * view.require("rollout_kl")).sum())


@pytest.mark.parametrize("correction", TRUST_REGIONS, ids=name_of)
def test_i_25_the_pull_back_grows_with_the_drift(correction: RLCallback) -> None:
    anchor = WITNESS.require("rollout_logprobs")
    fields: dict[str, Any] = dict.fromkeys(("old_logprobs", "ref_logprobs", "rollout_logprobs"), anchor)
    view = WITNESS.replace(**fields, token_extras={"teacher_logprobs": anchor})
    for sign in (-1.0, 1.0):
        pulls = []
        for gap in torch.linspace(0, 40, 81):
            leaf = (anchor + sign * gap).detach().requires_grad_()
            term = correction.loss_term(view.replace(logprobs=leaf))
            assert isinstance(term, LossTerm)
            (gradient,) = torch.autograd.grad(term.per_token[view.valid_tokens].sum(), leaf)
            pulls.append(sign * gradient[view.valid_tokens])
        force = torch.stack(pulls)
        assert force.isfinite().all() and (force.diff(dim=0) >= -1e-9).all() and (force[-1] > 0.9).all()
