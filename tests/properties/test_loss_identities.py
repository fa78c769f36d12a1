"""Every exported policy loss: what it must be on policy, under a scaled advantage, for rows that hold nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import callback_of
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import ClipCov, ClippedSurrogate, LossView, PolicyLoss, RLCallback, ValueLoss
from lightning_rl.corrections import Corrections
from lightning_rl.corrections.stat import reduce_moments
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.reductions import sequence_mean, token_mean
from properties.batches import KINDS, WITNESS, few, rows, shuffled_tokens, some, view_of_rows, views
from properties.corrections import CHANGES_ON_POLICY
from properties.evaluation import agree, evaluate, prepared_view, provided
from properties.exports import LOSS_EXAMPLES, VALUE_EXAMPLES, corrections_with, leaf_of, name_of, quick

each = pytest.mark.parametrize("name", quick(LOSS_EXAMPLES))
every = pytest.mark.parametrize("name", LOSS_EXAMPLES)
DIVERGENCES = [
    correction
    for correction in corrections_with("loss_term")
    if leaf_of(correction) == "logprobs" and not correction.chooses_rows
]
PLACED = ("clip_cov", "clip_cov-some")  # draw tokens by sample and position


def on_policy(view: LossView) -> LossView:
    """The view with four equal policies, and one advantage for all tokens of a row."""
    same = view.require("old_logprobs")
    per_row = torch.where(view.valid_tokens, row_mean(view.require("advantages"), view.valid_tokens)[:, None], 0.0)
    teacher = {"token_extras": {"teacher_logprobs": same}}
    return view.replace(logprobs=same, rollout_logprobs=same, ref_logprobs=same, advantages=per_row, **teacher)


def left_out(view: LossView, loss: PolicyLoss) -> Tensor:
    """Tokens that Clip-Cov leaves out, which is its point on policy as well."""
    if not isinstance(loss, ClipCov):
        return torch.zeros_like(view.valid_tokens)
    return prepared_view(view, loss).require("prepared")


@every
@given(view=views())
@some
def test_i_08_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, view: LossView) -> None:
    loss, view = LOSS_EXAMPLES[name], on_policy(view)
    found = evaluate(view, loss=loss, reduction=sequence_mean)
    weights = sequence_mean(view.valid_tokens, view.trained, view.groups)
    expected = -weights * view.require("advantages")
    agree(found.gradients[0], torch.where(left_out(view, loss), 0.0, expected))
    metrics = {key: float(reduce_moments(m.tolist(), "mean")) for key, m in found.metrics.items() if m[0]}
    ones = {"policy/ratio_max", "policy/ess", "policy/kept"} & metrics.keys()
    zeros = {key for key in metrics if key.startswith(("kl/", "policy/cl", "policy/outside"))}
    assert [metrics[key] for key in ones] == [1.0] * len(ones)
    assert [metrics[key] for key in zeros] == [0.0] * len(zeros)


ON_POLICY = [
    one
    for one in corrections_with("sequence_mask", "token_mask", "token_weight")
    if not isinstance(one, CHANGES_ON_POLICY)
]


@pytest.mark.parametrize("correction", ON_POLICY, ids=name_of)
@given(view=views())
@some
def test_i_08_on_policy_nothing_is_rejected_and_every_weight_is_1(correction: RLCallback, view: LossView) -> None:
    view = on_policy(view)
    factor, stats = Corrections([correction]).policy_factor(provided(view, correction))
    assert factor is not None and (factor[view.valid_tokens] == 1).all()
    for name, stat in stats.items():
        expected = 1.0 if name.endswith(("weight_mean", "ess")) else 0.0
        assert stat.moments[0] == 0 or stat.value() == pytest.approx(expected)


@pytest.mark.parametrize("correction", DIVERGENCES, ids=name_of)
@given(view=views())
@few
def test_i_08_on_policy_every_divergence_is_0_and_pulls_nowhere(correction: RLCallback, view: LossView) -> None:
    view = on_policy(view)
    with_term = evaluate(view, callbacks=[correction])
    plain = evaluate(view)
    assert with_term.parts[f"{correction.name}/loss"] == 0
    agree(with_term.gradients, plain.gradients)


@each
@given(view=views(), factor=st.sampled_from([0.25, 3.0]))
@some
def test_i_26_losses_are_affine_in_a_positive_factor_of_the_advantage(name: str, view: LossView, factor: float) -> None:
    loss = LOSS_EXAMPLES[name]
    view = prepared_view(view, loss)  # the selection may look at the size of advantages; here it stays what it was

    def at(scale: float) -> Tensor:
        found = evaluate(view.replace(advantages=view.require("advantages") * scale), loss=loss)
        return torch.cat([found.parts["loss/policy"].reshape(1), found.gradients[0].flatten()])

    nothing = at(0.0)
    agree(at(factor) - nothing, factor * (at(1.0) - nothing))


@each
@given(view=views())
@few
def test_i_26_on_policy_the_sign_of_the_advantage_is_that_of_the_gradient(name: str, view: LossView) -> None:
    loss, view = LOSS_EXAMPLES[name], prepared_view(on_policy(view), LOSS_EXAMPLES[name])
    plain = evaluate(view, loss=loss).gradients[0]
    agree(evaluate(view.replace(advantages=-view.require("advantages")), loss=loss).gradients[0], -plain)


@given(view=views())
@some
def test_i_26_a_dual_clip_acts_on_negative_advantages_alone(view: LossView) -> None:
    far = view.replace(logprobs=view.logprobs + 1.0)
    plain = evaluate(far, loss=ClippedSurrogate()).gradients[0]
    bounded = evaluate(far, loss=ClippedSurrogate(dual_clip=1.5)).gradients[0]
    negative = far.require("advantages") < 0
    assert torch.equal(plain[~negative], bounded[~negative])
    gone = negative & view.valid_tokens & (far.logprobs - far.require("old_logprobs") > math.log(1.5))
    assert not bounded[gone].any() and plain[gone].all()


@each
@given(view=views())
@some
def test_i_22_tokens_may_be_shuffled_within_their_row(name: str, view: LossView) -> None:
    loss = LOSS_EXAMPLES[name]
    if name in PLACED:
        view = prepared_view(view, loss)
    moved, order = shuffled_tokens(view)
    plain, found = evaluate(view, loss=loss), evaluate(moved, loss=loss)
    agree((found.loss, found.metrics), (plain.loss, plain.metrics))
    agree(found.gradients, tuple(gradient.gather(1, order) for gradient in plain.gradients))


@each
@given(given_rows=rows(kinds=["empty", "masked", "dropped", "padding"], most=3))
@few
def test_i_23_rows_without_a_token_add_nothing_and_break_nothing(name: str, given_rows: list) -> None:
    found = evaluate(view_of_rows(given_rows), loss=LOSS_EXAMPLES[name])
    assert found.loss == 0 and not any(gradient.any() for gradient in found.gradients)
    assert all(part == 0 for part in found.parts.values())
    assert all(moments[0] == 0 for key, moments in found.metrics.items() if key.startswith(("policy/", "kl/")))


@every
def test_i_23_no_rows_at_all_are_no_error(name: str) -> None:
    nothing = WITNESS.select(torch.zeros(len(WITNESS), dtype=torch.bool))
    assert evaluate(nothing, loss=LOSS_EXAMPLES[name]).loss == 0


@pytest.mark.parametrize("loss", VALUE_EXAMPLES.values(), ids=VALUE_EXAMPLES)
@given(view=views(kinds=KINDS))
@some
def test_i_08_a_critic_that_is_right_has_no_loss(loss: ValueLoss, view: LossView) -> None:
    right = view.replace(current_values=view.returns, values=view.returns)
    found = evaluate(right, value_loss=loss)
    assert found.parts["loss/value"] == 0 and not found.gradients[2].any()


@every
def test_i_12_the_metrics_of_a_loss_count_what_a_correction_rejects(name: str) -> None:
    reject = callback_of("reject", sequence_mask=lambda view: view.sample_ids % 2 == 0)
    plain, rejecting = (evaluate(WITNESS, loss=LOSS_EXAMPLES[name], callbacks=given) for given in ([], [reject]))
    rejected = rejecting.metrics.pop("reject/rejected")
    assert rejecting.metrics.keys() == plain.metrics.keys()
    assert all(torch.equal(rejecting.metrics[key], plain.metrics[key]) for key in plain.metrics)
    trained = WITNESS.sample_ids[WITNESS.trained]
    assert rejected[:2].tolist() == [len(trained), float((trained % 2 == 1).double().mean())]


@every
def test_i_12_shares_are_those_of_all_valid_tokens(name: str) -> None:
    metrics = evaluate(WITNESS, loss=LOSS_EXAMPLES[name]).metrics
    own = {key for key in metrics if key.startswith(("policy/", "kl/", "value/"))}
    assert own and {metrics[key][0].item() for key in own} == {float(WITNESS.valid_tokens.sum())}
    ratio = (WITNESS.logprobs - WITNESS.require("old_logprobs")).exp()[WITNESS.valid_tokens]
    assert_close(metrics["policy/ratio_max"][3], ratio.max())


@each
@given(view=views())
@few
def test_i_16_float32_is_close_to_float64(name: str, view: LossView) -> None:
    loss, view = LOSS_EXAMPLES[name], prepared_view(view, LOSS_EXAMPLES[name])
    exact = evaluate(view, loss=loss, reduction=token_mean)
    single = view.map(lambda tensor, _axis, _pad: tensor.float() if tensor.dtype == torch.float64 else tensor)
    found = evaluate(single, loss=loss, reduction=token_mean)
    assert found.loss.dtype == torch.float64 and found.gradients[0].dtype == torch.float32
    agree(found.loss, exact.loss, 1e-5)
    agree(tuple(gradient.double() for gradient in found.gradients), exact.gradients, 1e-5)
    assert all(moments.dtype == torch.float64 for moments in found.metrics.values())
