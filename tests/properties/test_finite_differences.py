"""Gradients against central differences in float64: every loss, every loss term, the critic's loss, the entropy bonus.

Where a factor is held fixed on purpose (the weight of CISPO, the ratio of a capped DPPO and of GSPO per token, masks
and weights of corrections), the difference is that of a form with this factor frozen at the point, written out here.
Points near a kink are moved: no gradient may jump within 1e-4 of the point along any coordinate.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl import CISPO, DPPO, GSPO, VESPO, LossView, PolicyLoss, Reinforce, RLCallback, ValueLoss
from lightning_rl.corrections import Corrections
from lightning_rl.signal.importance_ratios import sequence_ratio
from lightning_rl.signal.kl import KL_ESTIMATORS
from properties.batches import WITNESS
from properties.evaluation import LEAVES, evaluate, prepared_view, provided
from properties.exports import CORRECTIONS, LOSS_EXAMPLES, VALUE_EXAMPLES, corrections_with, leaf_of, name_of

Function = Callable[[Tensor], Tensor]
STEP, NEAR, ACCURACY = 1e-5, 1e-4, 1e-6
VIEW = WITNESS.sanitize().select(torch.tensor([0, 1, 2, 3, 4, 6]))
WEIGHTS = torch.linspace(0.5, 1.5, VIEW.valid_tokens.numel(), dtype=torch.float64).view(VIEW.valid_tokens.shape)


def total(per_token: Tensor) -> Tensor:
    return (torch.where(VIEW.valid_tokens, per_token, 0.0) * WEIGHTS).sum()


def slope(function: Function, point: Tensor) -> Tensor:
    leaf = point.detach().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def central(function: Function, point: Tensor) -> Tensor:
    """The central difference along every valid coordinate; 0 elsewhere."""
    found = torch.zeros_like(point)
    for place in VIEW.valid_tokens.nonzero().tolist():
        moved = torch.zeros_like(point)
        moved[tuple(place)] = STEP
        with torch.no_grad():
            found[tuple(place)] = (function(point + moved) - function(point - moved)) / (2 * STEP)
    return found


def smooth(function: Function, point: Tensor) -> bool:
    """Return True if neither value nor gradient jumps within 1e-4 of the point along any coordinate."""
    here, value = slope(function, point), float(function(point))
    allowed = 100 * NEAR * (1 + float(here.abs().max()))  # a curvature of this size is no kink
    for place in VIEW.valid_tokens.nonzero().tolist():
        for step in (NEAR, -NEAR):
            moved = point.clone()
            moved[tuple(place)] += step
            if max(float((slope(function, moved) - here).abs().max()), abs(float(function(moved)) - value)) > allowed:
                return False
    return True


def away_from_kinks(make: Callable[[Tensor], Function], point: Tensor) -> Tensor:
    """The point, moved until what ``make`` makes at it is smooth there."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        if smooth(make(point), point):
            return point
        point = point + 3e-3 * torch.randn(point.shape, generator=draw, dtype=point.dtype)
    raise AssertionError("no smooth point found")


def check(analytic: Callable[[Tensor], Tensor], make: Callable[[Tensor], Function], start: Tensor) -> Tensor:
    """Compares the gradient at a smooth point near ``start`` with the difference of the form made there."""
    point = away_from_kinks(make, start)
    ours, theirs = analytic(point), central(make(point), point)
    scale = theirs.abs().max()
    assert scale > 1e-3, "a test of a gradient of 0 proves nothing"
    assert (ours - theirs).abs().max() / scale < ACCURACY
    return ours


def at(logprobs: Tensor) -> LossView:
    return VIEW.replace(logprobs=logprobs)


def frozen_weight(loss: CISPO, point: Tensor) -> Function:
    ratio = (point - VIEW.require(f"{loss.anchor}_logprobs")).exp()
    weight = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return lambda logp: total(-weight * VIEW.require("advantages") * logp)


def frozen_ratio(loss: DPPO, point: Tensor) -> Function:
    rollout, advantages = VIEW.require("rollout_logprobs"), VIEW.require("advantages")
    assert loss.cap is not None
    weight = (point - rollout).exp().clamp(max=loss.cap)

    def form(logprobs: Tensor) -> Tensor:
        outside = loss.outside(VIEW.replace(logprobs=logprobs))
        return total(torch.where(outside, 0.0, -weight * advantages * logprobs))

    return form


def frozen_sequence_ratio(loss: GSPO, point: Tensor) -> Function:
    advantages = VIEW.require("advantages")
    of_row = sequence_ratio(point, VIEW.require("old_logprobs"), VIEW.valid_tokens, geometric=True)[:, None]

    def form(logprobs: Tensor) -> Tensor:
        ratio = of_row * (logprobs - point).exp()  # of the token: sg[s] p / sg[p]
        clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        return total(torch.maximum(-ratio * advantages, -clipped * advantages))

    return form


def form_of(loss: PolicyLoss, point: Tensor) -> Function:
    """Return the differentiated function: the loss itself unless it holds a factor fixed, with a fixed selection."""
    if isinstance(loss, CISPO):
        return frozen_weight(loss, point)
    if isinstance(loss, DPPO) and loss.cap is not None:
        return frozen_ratio(loss, point)
    if isinstance(loss, VESPO):
        weight = loss.weights(at(point))
        return lambda logprobs: total(-weight * VIEW.require("advantages") * logprobs)
    if isinstance(loss, GSPO) and loss.per_token:
        return frozen_sequence_ratio(loss, point)
    prepared = prepared_view(at(point), loss).prepared
    return lambda logprobs: total(loss(at(logprobs).replace(prepared=prepared)))


@pytest.mark.parametrize("name", LOSS_EXAMPLES)
def test_i_10b_gradient_of_every_loss(name: str) -> None:
    loss = LOSS_EXAMPLES[name]

    def analytic(point: Tensor) -> Tensor:
        prepared = prepared_view(at(point), loss).prepared
        return slope(lambda logprobs: total(loss(at(logprobs).replace(prepared=prepared))), point)

    found = check(analytic, lambda point: form_of(loss, point), VIEW.logprobs)
    assert not found[~VIEW.valid_tokens].any()


@pytest.mark.parametrize("correction", corrections_with("loss_term"), ids=name_of)
def test_i_10b_gradient_of_every_loss_term(correction: RLCallback) -> None:
    field, view = leaf_of(correction), provided(VIEW, correction)

    def value(leaf: Tensor) -> Tensor:
        return total(correction.loss_term(view.replace(**{field: leaf})).per_token)

    check(lambda point: slope(value, point), lambda _: value, VIEW.require(field))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("drift", [1.0, 12.0])
def test_i_10b_gradient_of_every_kl_estimator(name: str, drift: float) -> None:
    def value(logprobs: Tensor) -> Tensor:
        return total(KL_ESTIMATORS[name](logprobs, VIEW.require("ref_logprobs")))

    start = VIEW.require("ref_logprobs") + drift * (VIEW.logprobs - VIEW.require("ref_logprobs"))
    check(lambda point: slope(value, point), lambda _: value, start)


@pytest.mark.parametrize("correction", corrections_with("sequence_mask", "token_mask", "token_weight"), ids=name_of)
def test_i_10b_gradient_under_every_mask_and_weight_which_are_held_fixed(correction: RLCallback) -> None:
    corrections, loss = Corrections([correction]), Reinforce()

    def factor(point: Tensor) -> Tensor:
        found = corrections.policy_factor(provided(at(point), correction)).factor
        assert found is not None
        return found

    def analytic(point: Tensor) -> Tensor:
        options: dict[str, Any] = {"entropy_coef": 0.0, "value_loss": ValueLoss(coef=0.0)}
        options["reduction"] = lambda valid, *_: WEIGHTS * valid
        return evaluate(at(point), loss=loss, callbacks=[correction], **options).gradients[0]

    kept = factor(VIEW.logprobs)[VIEW.valid_tokens]
    if not kept.any():  # the geometric mask rejects every row of this batch
        assert not analytic(VIEW.logprobs).any()
        return

    def frozen(point: Tensor) -> Function:
        weight = factor(point)
        return lambda logprobs: total(weight * loss(at(logprobs)))

    check(analytic, frozen, VIEW.logprobs)


@pytest.mark.parametrize("loss", VALUE_EXAMPLES.values(), ids=VALUE_EXAMPLES)
def test_i_10b_gradient_of_the_value_loss(loss: Callable[..., Tensor]) -> None:
    def value(values: Tensor) -> Tensor:
        return total(loss(values, VIEW.require("values"), VIEW.require("returns")))

    check(lambda point: slope(value, point), lambda _: value, VIEW.require("current_values"))


@pytest.mark.parametrize("field", LEAVES)
def test_i_10b_gradient_of_the_whole_objective(field: str) -> None:
    terms = [one for one in corrections_with("loss_term") if "token_reward" not in one.contributes]
    terms = [one for one in terms if field == "rollout_kl" or leaf_of(one) != "rollout_kl"]  # its factor is held fixed
    unique = list({correction.name: correction for correction in terms}.values())

    def value(leaf: Tensor) -> Tensor:
        with torch.enable_grad():
            return evaluate(VIEW.replace(**{field: leaf.detach()}), callbacks=unique, loss=LOSS_EXAMPLES["ppo"]).loss

    def analytic(point: Tensor) -> Tensor:
        found = evaluate(VIEW.replace(**{field: point}), callbacks=unique, loss=LOSS_EXAMPLES["ppo"])
        return found.gradients[LEAVES.index(field)]

    start = VIEW.require(field)
    ours, theirs = analytic(start), central(value, start)
    assert theirs.abs().max() > 1e-3 and (ours - theirs).abs().max() / theirs.abs().max() < ACCURACY


def test_every_kind_of_contribution_to_the_loss_is_checked_here() -> None:
    covered = {"sequence_mask", "token_mask", "token_weight", "loss_term"}
    offered = set().union(*(correction.contributes for correction in CORRECTIONS))
    assert offered & covered == covered
