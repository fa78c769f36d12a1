"""From a peer's parameters and built-in constants to our options: the one place where peers are told apart."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from goldens.cases import Case
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.kl import Clamped, KLEstimator, k3, kl_estimator

Steps = Literal["valid", "every", "every, masked ones empty", "runs"]
"""Which positions are time steps: the valid ones, all of them, or the valid ones of one uninterrupted run."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Constants inside the functions of a system that records do not contain."""

    log_ratio: float = math.inf  # bound of a token's log-ratio before exp
    sequence_log_ratio: float = math.inf  # bound of a row's mean log-ratio before exp
    gspo_per_token: bool = False  # a separate gradient for every token
    mean_advantage: bool = False  # a loss of whole rows takes the mean advantage of the row
    cispo_floor: bool = True  # whether the weight has a lower bound
    cispo_offset: float = 1.0  # what the weight's upper bound is above its parameter
    score_function_kl: bool = False  # the KL in the loss carries the score-function gradient
    value_factor: float = 0.5
    epsilon: float = 1e-6  # added to the deviation of a group
    gdpo_epsilon: float | None = None  # added to the last deviation, if another one
    unbiased: bool = True  # whether the variance of a group divides by n - 1
    steps: Steps = "every"
    whitened: bool = False  # whether the estimator whitens its advantages
    row_advantages: bool = False  # one advantage for each row, not for each token


PEERS: Mapping[str, Peer] = {
    "AReaL": Peer(epsilon=1e-5, mean_advantage=True),
    "NeMo-RL": Peer(score_function_kl=True, gdpo_epsilon=0.0),
    "OpenRLHF": Peer(log_ratio=20.0, epsilon=1e-9, steps="every, masked ones empty"),
    "SkyRL": Peer(log_ratio=20.0, sequence_log_ratio=10.0, gspo_per_token=True, whitened=True),
    "open-instruct": Peer(cispo_floor=False, epsilon=1e-8, unbiased=False),
    "prime-rl": Peer(),
    "slime": Peer(value_factor=1.0),
    "trl": Peer(cispo_floor=False, cispo_offset=0.0, epsilon=1e-4, row_advantages=True),
    "verl": Peer(log_ratio=20.0, sequence_log_ratio=10.0, gspo_per_token=True, steps="valid", whitened=True),
}

IMPLICIT: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "factor": lambda value: {"value_factor": value},
    "log_ratio_clamp": lambda value: {"log_ratio": value},
    "log_ratio_max": lambda value: {"sequence_log_ratio": value},
    "std_ddof": lambda value: {"unbiased": bool(value)},
    "masked_positions": lambda value: {"steps": MASKED[value]} if value in MASKED else {},
}
"""Constants that a record states for a function, as changes of the peer's conventions."""

MASKED: Mapping[str, Steps] = {
    "carried through": "valid",
    "running return carried through; returns zero there": "valid",
    "no mask argument": "every",
    "not skipped in the recursion": "every",
    "value and reward multiplied by mask, not skipped": "every, masked ones empty",
    "running return reset to 0 at masked positions": "runs",
}

KL_BOUNDS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("AReaL", "*"): {"value": 10.0},
    ("NeMo-RL", "*"): {"log_ratio": 20.0, "value": 10.0},
    ("OpenRLHF", "*"): {"value": 10.0},
    ("SkyRL", "k3"): {"log_ratio": 20.0, "value": 10.0},
    ("open-instruct", "*"): {"log_ratio": 40.0},
    ("slime", "low_var_kl"): {"value": 10.0},
    ("verl", "k3"): {"log_ratio": 20.0, "value": 10.0},
    ("verl", "low_var_kl"): {"log_ratio": 20.0, "value": 10.0},
}
"""Clamps around an estimator, by peer and estimator, ``*`` for all of them."""

CLAMP = 10.0

KL_BOUND_NAMES = {
    "log_ratio_clamp": "log_ratio",
    "input_clamp_value": "log_ratio",
    "kl_input_clamp_value": "log_ratio",
    "output_clamp_value": "value",
    "kl_output_clamp_value": "value",
}
"""Clamps that a peer has parameters for; null is none."""

ESTIMATOR_NAMES = ("kl_estimator", "kl_estimator_type", "kl_loss_type", "kl_type", "kl_penalty", "estimator", "kl")

KL_NAMES = {
    "kl": "k1",
    "mse": "k2",
    "low_var_kl": "k3",
    "linear": "k1",
    "quadratic": "k2",
    0: "k1",
    1: "k2",
    2: "k3",
    3: "k1",
}
"""Peers' names of estimators that differ from ours; 3 is k1 times the importance ratio."""


def peer_of(case: Case) -> Peer:
    """The conventions of the system that a case comes from, with what the record says of this function."""
    peer = PEERS.get(case.peer, Peer())
    for name, change in IMPLICIT.items():
        if name in case.implicit:
            peer = replace(peer, **change(case.implicit[name]))
    return peer


def peer_ratio(case: Case, numerator: Tensor, denominator: Tensor) -> Tensor:
    """An importance ratio as the peer reports it.

    The one rule for extreme log-ratios: ours end at 20, and wherever a peer's are compared with them, ours are asked
    for with the bound of that peer, which is none for most.
    """
    return policy_ratio(numerator, denominator, bound=peer_of(case).log_ratio)


def first_of(params: Mapping[str, Any], names: tuple[str, ...], default: Any = None) -> Any:
    """The first of several parameters that is given and not None."""
    return next((params[name] for name in names if params.get(name) is not None), default)


def estimator_of(case: Case, name: str | int, *, weight: Tensor | None = None) -> KLEstimator:
    """Our estimator for a peer's, times a weight, inside the clamps that this peer puts around both.

    A plus behind the name changes the gradient alone, which is not the estimator's concern.
    """
    name = name.removesuffix("+") if isinstance(name, str) else name
    plain = kl_estimator(KL_NAMES.get(name, str(name)))
    plain = partial(k3, tangent=False) if plain is k3 else plain  # no peer has a tangent
    bounds = _kl_bounds(case, str(name))
    bounded = Clamped(plain, value=math.inf, log_ratio=bounds["log_ratio"]) if bounds["log_ratio"] < math.inf else plain
    if bounds["value"] == math.inf and weight is None:
        return bounded

    def weighted(logprobs: Tensor, other: Tensor) -> Tensor:
        value = bounded(logprobs, other)
        value = value if weight is None else weight * value
        return (
            value
            if bounds["value"] == math.inf
            else Clamped(lambda _gap, _zero: value, value=bounds["value"])(logprobs, other)
        )

    return weighted


def option_of(case: Case, name: str) -> KLEstimator | str:
    """Return the option of our corrections for a peer's estimator: its name, or k3 with a clamped value."""
    plain = KL_NAMES.get(name, name)
    return Clamped(k3) if plain == "k3" and _kl_bounds(case, name)["value"] == CLAMP else plain


def _kl_bounds(case: Case, name: str) -> dict[str, float]:
    bounds = {"value": math.inf, "log_ratio": math.inf}
    if case.params.get("apply_clamp") is False:
        return bounds
    bounds |= KL_BOUNDS.get((case.peer, name), KL_BOUNDS.get((case.peer, "*"), {}))
    for theirs, ours in KL_BOUND_NAMES.items():
        if theirs in case.params:
            bounds[ours] = case.params[theirs] or math.inf
    return bounds
