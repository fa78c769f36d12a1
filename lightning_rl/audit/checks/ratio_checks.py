"""Checks of importance ratios: a weight carries the one that it declares, and no policy counts more than once."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_rl.audit.audit_error import Skip, gradient_of
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.corrections import LossView
from lightning_rl.utils.finding import Finding

FIELDS = {"current": "logprobs", "old": "old_logprobs", "rollout": "rollout_logprobs"}
STEP = 0.01  # nats
SMALL_STEP = 1e-4  # that leaves the ratio of a whole response within the narrowest clip range, 3e-4 of GSPO
NONE, ONE = 0.25, 0.75  # powers below which a policy plays no part, and above which it counts
MAX_POWER = 1.5

Powers = dict[str, float]


@check(
    cure="declare the ratio that the weight computes, as ratio = (numerator, denominator), so that no policy counts "
    "twice beside another weight or the loss"
)
def declared_ratio(evidence: Evidence) -> Iterator[Finding | Skip]:
    """A weight rises with the policy in the numerator of its declared ratio and falls with that in the denominator,
    where all policies agree; one that declares none carries none.
    """
    view = _agreeing(evidence)
    if view is None:
        yield Skip("no checked row trains")
        return
    for weight in evidence.contributions("token_weight"):
        powers = powers_of(weight, view)
        declared = weight.callback.ratio
        numerators = [policy for policy, power in powers.items() if power > ONE]
        denominators = [policy for policy, power in powers.items() if power < -ONE]
        observed = f"powers {', '.join(f'{power:.2g} of {policy}' for policy, power in powers.items())}"
        if declared is None:
            wrong = bool(numerators and denominators)
        elif declared[0] not in powers or declared[1] not in powers:
            continue
        else:
            others = max((abs(power) for policy, power in powers.items() if policy not in declared), default=0.0)
            wrong = powers[declared[0]] < NONE or powers[declared[1]] > -NONE or others > ONE
        if wrong:
            expected = "no importance ratio" if declared is None else f"the ratio {declared[0]}/{declared[1]}"
            yield Finding(culprit=str(weight), expected=f"{expected}, as it declares", observed=observed)


@check(
    expected="the current policy's probability at most once in loss times weights",
    cure="leave the ratio out of the loss or of the weight",
)
def joint_ratio(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Near a ratio of 1 the gradient of a token's loss, times all weights, grows with the token's own current
    probability at most as that probability itself.
    """
    loss, view = evidence.algorithm.loss, _agreeing(evidence)
    if loss.prepares or view is None:
        yield Skip("the loss looks at the whole step" if loss.prepares else "no checked row trains")
        return
    own = _own_power(lambda view: gradient_of(torch.where(view.valid_tokens, loss(view), 0.0), view.logprobs), view)
    weights = {str(weight): _own_power(weight, view) for weight in evidence.contributions("token_weight")}
    total = own + sum(weights.values())
    if total > MAX_POWER:
        guilty = [name for name, power in weights.items() if power > NONE] if own <= MAX_POWER else []
        culprit = ", ".join(guilty) or f"loss {evidence.names['loss']}"
        yield Finding(culprit=culprit, observed=f"a power of {total:.2f}, {own:.2f} of it in the loss")


def _agreeing(evidence: Evidence) -> LossView | None:
    """The view of a step in which all policies agree."""
    view = evidence.view(evidence.on_policy, drift=0.0).sanitize()
    counts = view.valid_tokens & (view.require("advantages") != 0)
    return view if counts.any() else None


def powers_of(weight: Callable[[LossView], Tensor], view: LossView) -> Powers:
    """The power of each policy's probability in a weight: how its logarithm grows with a log-probability."""
    valid, powers = view.valid_tokens, Powers()
    for policy, field in FIELDS.items():
        if getattr(view, field) is not None:
            up, down = (_move(view, field, step * valid) for step in (STEP, -STEP))
            powers[policy] = _growth(weight(down), weight(up), valid, 2 * STEP)
    return powers


def _own_power(function: Callable[[LossView], Tensor], view: LossView) -> float:
    """The power of a token's own current probability in what a function says of it."""
    valid = view.valid_tokens & (view.require("advantages") != 0)
    first = valid & (valid.cumsum(-1) == 1)
    return _growth(function(view), function(_move(view, "logprobs", SMALL_STEP * first)), first, SMALL_STEP)


def _move(view: LossView, field: str, step: Tensor) -> LossView:
    moved = getattr(view, field).detach() + step.to(view.logprobs.dtype)
    return view.replace(**{field: moved.requires_grad_() if field == "logprobs" else moved})


def _growth(before: Tensor, after: Tensor, places: Tensor, step: float) -> float:
    """The median growth of the logarithm of a size, in steps of so many nats."""
    one, other = before.detach().double().abs(), after.detach().double().abs()
    safe = places & (one > 1e-12) & (other > 1e-12)
    if not safe.any():
        return 0.0
    return float((other[safe].log() - one[safe].log()).median() / step)
