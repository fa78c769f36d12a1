"""Checks of formulas: losses, terms and weights at ratios and advantages that a rollout may not contain.

Their results depend on the algorithm and not on the samples. All policies agree in their views, except where a check
moves one of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    KLCov,
    PolicyLoss,
    Reinforce,
    ValueLoss,
)
from lightning_rl.losses.policy_loss import prepared_tokens
from lightning_rl.testing.properties.case import AlgorithmCase, holds_logprobs, pattern_of
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import NO_ROWS, Skip, gradient_of
from lightning_rl.utils.finding import Finding

POLICIES = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
GAPS = (0.0, 0.05, -0.05, 0.5, -0.5)  # of log-probabilities, in nats
AROUND = (0.9, 1.1, 3.0)  # times a clip bound
CLOSE = 1e-4  # relative difference of two gradients
FEW_TOKENS = 16  # per row


def uniform_view(
    case: AlgorithmCase,
    gap: float = 0.0,
    advantage: float = 1.0,
    *,
    spread: float = 0.0,
    dtype: Any = torch.float64,
) -> LossView:
    """Return a view with one advantage everywhere, in which the current policy is ``gap`` nats above all others.

    Args:
        case: AlgorithmCase with the rows.
        gap: Log-ratio of the current policy to every other one.
        advantage: Advantage of every valid token.
        spread: Largest distance of two policies, by a pattern over tokens, in nats.
        dtype: Dtype of all fields.
    """
    view = case.view().sanitize()
    if view.width > FEW_TOKENS:
        view = view.fit_width(FEW_TOKENS)
    valid, pattern = view.valid_tokens, pattern_of(view)
    base = torch.where(valid, -1.5 + 0.5 * pattern, 0.0)
    moves = {name: 0.5 * spread * torch.sin(7.0 * pattern + place) for place, name in enumerate(POLICIES)}
    moves["logprobs"] = moves["logprobs"] + gap
    fields = {
        name: torch.where(valid, (base + moves[name]).float(), 0.0).to(dtype)
        for name in POLICIES
        if getattr(view, name) is not None
    }
    view = view.map(lambda tensor, _axis, _pad: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor)
    other = fields.get("ref_logprobs", fields["old_logprobs"])
    extras = {name: other if holds_logprobs(tensor, view) else tensor for name, tensor in view.token_extras.items()}
    fields["logprobs"].requires_grad_()
    return case.prepare(view.replace(advantages=advantage * valid.to(dtype), token_extras=extras, **fields))


def _gradient(loss: PolicyLoss, view: LossView) -> Tensor:
    return gradient_of(torch.where(view.valid_tokens, loss(view), 0.0), view.logprobs)


def _clipped_slope(loss: Any, gap: float, sign: float, _view: LossView) -> float:
    ratio, dual = math.exp(gap), math.inf if loss.dual_clip is None else loss.dual_clip
    live = ratio <= 1 + loss.clip_high if sign > 0 else 1 - loss.clip_low <= ratio <= dual
    return -ratio * sign * live


def _cispo(loss: Any, gap: float, sign: float, _view: LossView) -> float:
    return -sign * min(max(math.exp(gap), 1 - loss.clip_low), 1 + loss.clip_high)


def _dppo(loss: Any, gap: float, sign: float, view: LossView) -> Tensor:
    then, ratio = view.require("rollout_logprobs").exp(), math.exp(gap)
    now = then * ratio
    distance = (now - then).abs()
    if loss.divergence == "kl":
        distance = -then * gap + (1 - then) * torch.log((1 - then) / (1 - now).clamp(min=1e-8))
    outside = distance > (loss.high if sign > 0 else loss.low) if gap * sign > 0 else torch.zeros_like(now) > 0
    return torch.where(outside, 0.0, -sign * min(ratio, math.inf if loss.cap is None else loss.cap))


def _gmpo(loss: Any, gap: float, sign: float, _view: LossView) -> float:
    return -sign * math.exp(gap) * (gap <= loss.clip_high if sign > 0 else gap >= -loss.clip_low)


def _sapo(loss: Any, gap: float, sign: float, _view: LossView) -> float:
    ratio, tau = math.exp(gap), loss.tau_positive if sign > 0 else loss.tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 * gate * (1 - gate) * ratio * sign


def _vespo(loss: Any, gap: float, sign: float, view: LossView) -> Tensor:
    power, rate = (loss.k_positive, loss.lambda_positive) if sign > 0 else (loss.k_negative, loss.lambda_negative)
    log_ratio = (gap * view.valid_tokens.sum(-1, keepdim=True).double()).clamp(-20, 20)
    return -sign * torch.exp(power * log_ratio + rate * (1 - log_ratio.exp()))


SLOPES: Mapping[type, Callable[[Any, float, float, LossView], Tensor | float]] = {
    **dict.fromkeys((ClippedSurrogate, GSPO, ClipCov, M2PO), _clipped_slope),
    CISPO: _cispo,
    DPPO: _dppo,
    DRO: lambda loss, gap, sign, _view: loss.beta * gap - sign,
    GMPO: _gmpo,
    KLCov: lambda _loss, gap, sign, _view: -math.exp(gap) * sign,
    Reinforce: lambda _loss, _gap, sign, _view: -sign,
    SAPO: _sapo,
    VESPO: _vespo,
}
"""Derivative of each published loss by a log-probability, as (loss, log-ratio, advantage, view).

Source: the formulas in the docstrings of :mod:`lightning_rl.losses`, with one ratio and advantage at all tokens.
"""


def _gaps(loss: PolicyLoss) -> list[float]:
    """Return log-ratios on both sides of the bounds of a loss, and none at a bound."""
    low, high = (float(getattr(loss, name, 0.2)) for name in ("clip_low", "clip_high"))
    dual = getattr(loss, "dual_clip", None)
    bounds = [high, -low] if isinstance(loss, GMPO) else [math.log1p(high), math.log1p(-min(low, 1 - 1e-3))]
    bounds += [] if dual is None else [math.log(dual)]
    gaps = [*GAPS, *(part * bound for bound in bounds for part in AROUND)]
    return [gap for gap in gaps if not any(abs(gap - bound) < 1e-3 * abs(bound) for bound in bounds)]


@check(
    culprit="loss {loss}",
    cure="take the larger of the plain and the clipped loss, and clip only where the ratio follows the advantage",
)
def loss_formula(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """The gradient of a policy loss is that of its formula at ratios on both sides of each bound.

    A subclass of a published loss has no gradient where its formula has none, and one elsewhere. Any other loss has a
    gradient where the ratio is 1 or moved against the advantage, of either sign.
    """
    loss = case.algorithm.loss
    kinds = [kind for kind in type(loss).__mro__ if kind in SLOPES]
    if not case.rows.valid_tokens.any():
        yield Skip(NO_ROWS)
        return
    alive = [bool((_gradient(loss, uniform_view(case, 0.0, sign)) != 0).any()) for sign in (1.0, -1.0)]
    if not kinds and not any(alive):
        return  # gradient_liveness reports it
    for sign in (1.0, -1.0):
        for gap in _gaps(loss) if kinds else GAPS:
            view = uniform_view(case, gap, sign)
            valid = view.valid_tokens
            if isinstance(loss, ClipCov):
                valid = valid & ~prepared_tokens(view)
            ours = _gradient(loss, view).double()[valid]
            slope = SLOPES[kinds[0]](loss, gap, sign, view) if kinds else 1.0
            wanted = torch.as_tensor(slope, dtype=ours.dtype, device=ours.device).expand_as(valid)[valid]
            if type(loss) in SLOPES:
                wrong = bool(((ours - wanted).abs() > CLOSE * wanted.abs().clamp(min=0.1)).any())
            elif kinds:
                wrong = bool((ours == 0).all() if (wanted != 0).all() else (wanted == 0).all() and (ours != 0).all())
            else:
                wrong = gap * sign <= 0 and bool((ours == 0).all())
            if wrong:
                expected = f"{float(wanted.double().mean()):.4g} on average" if kinds else "a gradient"
                yield Finding(
                    expected=f"{expected} at a ratio of {math.exp(gap):.4g} and an advantage of {sign:g}",
                    observed=f"{float(ours.mean()):.4g}",
                )
                return


@check(
    culprit="loss {loss}",
    expected="no gradient without an advantage, where all policies agree",
    observed="one",
    cure="multiply by view.advantages, and add a term of the log-probabilities as a loss_term of a correction",
)
def loss_needs_advantages(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Without an advantage the policy loss has no gradient, and advantages have none themselves."""
    if not case.rows.valid_tokens.any():
        yield Skip(NO_ROWS)
        return
    if case.rollout.require("advantages").requires_grad:
        yield Finding(culprit="estimator {estimator}".format(**case.names), expected="advantages without gradient")
    elif bool((_gradient(case.algorithm.loss, uniform_view(case, advantage=0.0)).abs() > 1e-6).any()):
        yield Finding()


@check(
    expected="another number after a change of every log-probability by 1e-5 nats",
    observed="the same, as after rounding to bfloat16",
    cure="compute ratios and weights in float32: a log-probability in bfloat16 has two digits",
)
def single_precision(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Losses, terms and weights follow a small change of a log-probability wherever they follow a larger one."""
    if not case.rows.valid_tokens.any():
        yield Skip(NO_ROWS)
        return
    view = uniform_view(case, spread=1.0)
    parts: dict[str, Callable[[LossView], Tensor]] = {f"loss {case.names['loss']}": case.algorithm.loss}
    parts |= {str(one): one for one in case.contributions("token_weight")}
    parts |= {str(one): lambda view, one=one: one(view).per_token for one in case.contributions("loss_term")}
    for culprit, function in parts.items():
        for name in POLICIES:
            if getattr(view, name) is not None and _rounds_to_half(function, view, name):
                yield Finding(culprit=culprit)
                break


def _rounds_to_half(function: Callable[[LossView], Tensor], view: LossView, policy: str) -> bool:
    """Return True if most results follow steps of 0.05 nats of a policy, but none of 1e-5 nats."""

    def at(step: float) -> Tensor:
        moved = (getattr(view, policy).detach() + step * view.valid_tokens).requires_grad_(policy == "logprobs")
        return torch.where(view.valid_tokens, function(view.replace(**{policy: moved})), 0.0).detach()

    plain = at(0.0)
    follows = (at(0.05) != plain) & (at(-0.05) != plain)
    same = (at(1e-5) == plain) & follows
    return bool(follows.any()) and int(same.sum()) > 0.5 * int(follows.sum())


@check(
    cure="take the larger of the plain and the clipped error, with values clipped around those before the update",
)
def value_loss_formula(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """The gradient of the value loss is that of its formula within and beyond its clip range, on both sides."""
    loss = case.algorithm.value_loss
    if case.rows.values is None:
        yield Skip("there is no critic")
        return
    reach = 1.0 if loss.clip is None else loss.clip
    moves = reach * torch.tensor([[-3.0, -1.1, -0.9, 0.5, 0.9, 1.1, 3.0]], dtype=torch.float64)
    for target in (5.0 * reach, -5.0 * reach, 0.2 * reach):
        leaf, old = moves.clone().requires_grad_(), torch.zeros_like(moves)
        ours = gradient_of(loss(leaf, old, torch.full_like(moves, target)), leaf)
        wanted = _value_slope(loss, moves, target)
        if bool(((ours - wanted).abs() > CLOSE * reach).any()):
            expected, observed = (" ".join(f"{number:.3g}" for number in part[0].tolist()) for part in (wanted, ours))
            yield Finding(
                culprit=f"the value loss {type(loss).__name__}",
                expected=f"the gradients {expected} for values that moved by {' '.join(f'{m:.3g}' for m in moves[0])} "
                f"and a return of {target:.3g}",
                observed=observed,
            )
            return


def _value_slope(loss: ValueLoss, values: Tensor, target: float) -> Tensor:
    """Return the derivative of the published value loss by the value, around old values of 0."""
    plain = (values - target).clamp(-loss.huber, loss.huber)
    if loss.clip is None:
        return plain
    further = (values.clamp(-loss.clip, loss.clip) - target).abs() > (values - target).abs()
    return torch.where(further & (values.abs() > loss.clip), 0.0, plain)
