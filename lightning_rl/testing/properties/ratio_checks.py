"""Checks of importance ratios: a weight contains its declared ratio, and no policy counts twice."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import NO_ROWS, Skip, gradient_of
from lightning_rl.testing.properties.formula_checks import CLOSE, SLOPES, uniform_view
from lightning_rl.utils.finding import Finding

FIELDS = {"current": "logprobs", "old": "old_logprobs", "rollout": "rollout_logprobs", "ref": "ref_logprobs"}
STEP = 0.01  # nats
SMALL_STEP = 1e-4  # keeps the ratio of a response within the narrowest clip range, 3e-4 of GSPO
NONE, ONE = 0.25, 0.75  # exponents below which a policy does not count, and above which it does
MAX_POWER = 1.5
SYMMETRIC, ONE_WAY = "ratios of single tokens or of whole responses", "a ratio that depends on one side of the response"

Powers = dict[str, float]


@check(
    cure="declare the ratio that the weight or loss computes, as ratio = (numerator, denominator), so that no policy "
    "counts twice; a loss takes it to the policy that it reads first"
)
def declared_ratio(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """A weight is proportional to the numerator of its declared ratio and to the inverse of the denominator.

    A weight without a declared ratio contains none. The gradient of a loss depends on the denominator of its declared
    ratio, and falls with the probability under no other policy; without a declared ratio, not with the reference's. A
    ratio is no root of one and, where all policies agree, no constant other than 1. The ratio of a token does not
    depend on others, or tokens depend on each other.
    """
    yield from _wrong_ratio_of_loss(case)
    view = _agreeing(case)
    if view is None:
        yield Skip(NO_ROWS)
        return
    for weight in case.contributions("token_weight"):
        powers = powers_of(weight, view)
        declared = weight.callback.ratio
        if _accumulates(weight, view):
            yield Finding(culprit=str(weight), expected=SYMMETRIC, observed=ONE_WAY)
            continue
        numerators = [policy for policy, power in powers.items() if power > ONE]
        denominators = [policy for policy, power in powers.items() if power < -ONE]
        observed = f"powers {', '.join(f'{power:.2g} of {policy}' for policy, power in powers.items())}"
        if declared is None:
            wrong = bool(numerators and denominators)
        elif declared[0] not in powers or declared[1] not in powers:
            continue
        else:
            others = max((abs(power) for policy, power in powers.items() if policy not in declared), default=0.0)
            wrong = powers[declared[0]] < ONE or powers[declared[1]] > -ONE or others > ONE
            values, own = weight(view)[view.valid_tokens].double(), _own_power(weight, view, FIELDS[declared[1]])
            multiple = not weight.callback.provides and bool(((values - 1).abs() > CLOSE).all())
            if not wrong and multiple and float(values.max() - values.min()) < CLOSE:
                wrong, observed = True, f"{float(values[0]):.3g} times the ratio"
            elif not wrong and own < -MAX_POWER:
                wrong, observed = True, f"the power {-own:.2g} of the ratio"
        if wrong:
            expected = "no importance ratio" if declared is None else f"the ratio {declared[0]}/{declared[1]}"
            yield Finding(culprit=str(weight), expected=f"{expected}, as it declares", observed=observed)


@check(
    expected="the current policy's probability at most once in loss times weights",
    cure="leave the ratio out of the loss or of the weight",
)
def joint_ratio(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Near a ratio of 1 the gradient of a token's loss times all weights is at most linear in its probability."""
    loss, view = case.algorithm.loss, _agreeing(case)
    if loss.prepares or view is None:
        yield Skip("the loss reads the whole step" if loss.prepares else NO_ROWS)
        return

    def signed_gradient(view: LossView) -> Tensor:
        """Return the part of the gradient that changes its sign with the advantages, so no penalty of a distance."""
        both = (view, view.replace(advantages=-view.require("advantages")))
        plus, minus = (gradient_of(torch.where(one.valid_tokens, loss(one), 0.0), one.logprobs) for one in both)
        return plus - minus

    own = _own_power(signed_gradient, view)
    if type(loss) in SLOPES:  # VESPO has other powers
        own = min(own, 1.0)
    weights = {str(weight): _own_power(weight, view) for weight in case.contributions("token_weight")}
    total = own + sum(weights.values())
    if total > MAX_POWER:
        guilty = [name for name, power in weights.items() if power > NONE] if own <= MAX_POWER else []
        culprit = ", ".join(guilty) or f"loss {case.names['loss']}"
        yield Finding(culprit=culprit, observed=f"a power of {total:.2f}, {own:.2f} of it in the loss")


def _wrong_ratio_of_loss(case: AlgorithmCase) -> Iterator[Finding]:
    """Yield a finding if the gradient of the policy loss depends on another policy than the declared one."""
    loss, culprit = case.algorithm.loss, f"loss {case.names['loss']}"

    def gradient(view: LossView) -> Tensor:
        leaf = view.logprobs.detach().requires_grad_()
        return gradient_of(torch.where(view.valid_tokens, loss(view.replace(logprobs=leaf)), 0.0), leaf)

    views = [uniform_view(case, advantage=sign) for sign in (1.0, -1.0)] if case.rows.valid_tokens.any() else []
    signed = [powers_of(gradient, view, SMALL_STEP) for view in views]
    powers = {policy: max(both[policy] for both in signed) for policy in (signed or [{}])[0]}
    declared = loss.ratio or ("current", "old", "rollout")
    others = [policy for policy, power in powers.items() if policy not in declared and power < -ONE]
    idle = loss.ratio is not None and loss.ratio[1] in powers
    roots = [abs(power) for policy, power in powers.items() if policy in declared and NONE < abs(power) < ONE]
    if type(loss) not in SLOPES and views and _accumulates(loss, views[0]):
        yield Finding(culprit=culprit, expected=SYMMETRIC, observed=ONE_WAY)
    elif type(loss) not in SLOPES and len(roots) > 1:
        yield Finding(culprit=culprit, expected="a ratio of probabilities", observed=f"one to the power {roots[0]:.2g}")
    for view in views if idle else []:
        moved = _move(view, FIELDS[declared[1]], 0.3 * view.valid_tokens)
        idle = idle and bool(torch.allclose(gradient(view), gradient(moved), rtol=1e-4, atol=0.0))
    if others or idle:
        yield Finding(
            culprit=culprit,
            expected="a ratio to "
            + (f"the policy {declared[1]}, as it declares" if loss.ratio else "a policy that sampled"),
            observed=f"one to {', '.join(others)}" if others else "a gradient that does not depend on it",
        )


def _accumulates(function: Callable[[LossView], Tensor], view: LossView) -> bool:
    """Return True if the first token of a response changes the value of the last, or the last that of the first.

    Only one of them does so in a product of ratios up to each token.
    """
    order, valid = view.valid_tokens.cumsum(-1), view.valid_tokens & (view.valid_tokens.sum(-1, keepdim=True) > 1)
    first, last = valid & (order == 1), valid & (order == order[:, -1:])
    values, moved = function(view).detach(), [False, False]
    for place, (source, target) in enumerate(((first, last), (last, first))):
        for field in FIELDS.values():
            for step in (STEP, -STEP) if getattr(view, field) is not None else ():
                change = (function(_move(view, field, step * source)).detach() - values)[target].abs()
                moved[place] |= bool((change > CLOSE * STEP).any())
    return moved[0] != moved[1]


def _agreeing(case: AlgorithmCase) -> LossView | None:
    """Return the view of a step in which all policies agree."""
    view = case.view(case.on_policy, drift=0.0).sanitize()
    counts = view.valid_tokens & (view.require("advantages") != 0)
    return view if counts.any() else None


def powers_of(weight: Callable[[LossView], Tensor], view: LossView, step: float = STEP) -> Powers:
    """Return the exponent of each policy's probability in a weight: its log growth per nat.

    The growth in one of both directions, as the other one may be clipped.
    """
    valid, powers = view.valid_tokens, Powers()
    for policy, field in FIELDS.items():
        if getattr(view, field) is not None:
            moves = [(move, weight(_move(view, field, move * valid))) for move in (step, -step)]
            here = weight(view)
            powers[policy] = max((_growth(here, there, valid, move) for move, there in moves), key=abs)
    return powers


def _own_power(function: Callable[[LossView], Tensor], view: LossView, field: str = "logprobs") -> float:
    """Return the exponent of a token's own probability in the result of a function."""
    valid = view.valid_tokens & (view.require("advantages") != 0)
    first = valid & (valid.cumsum(-1) == 1)
    return _growth(function(view), function(_move(view, field, SMALL_STEP * first)), first, SMALL_STEP)


def _move(view: LossView, field: str, step: Tensor) -> LossView:
    moved = getattr(view, field).detach() + step.to(view.logprobs.dtype)
    return view.replace(**{field: moved.requires_grad_() if field == "logprobs" else moved})


def _growth(before: Tensor, after: Tensor, places: Tensor, step: float) -> float:
    """Return the median growth of the log of an absolute value, per step in nats."""
    one, other = before.detach().double().abs(), after.detach().double().abs()
    safe = places & (one > 1e-12) & (other > 1e-12)
    if not safe.any():
        return 0.0
    return float((other[safe].log() - one[safe].log()).median() / step)
