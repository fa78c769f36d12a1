"""Which function replays which algorithm, and what is knowingly left out."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, TypeVar

from goldens.cases import Case, Outputs

Replay = Callable[[Case], Outputs]
Chosen = TypeVar("Chosen")

REPLAYS: dict[str, Replay] = {}
"""By ``topic/function`` of the other system, or ``topic/*`` for the other functions of a topic."""


class NotOfferedError(Exception):
    """Raised for a call that the library has no counterpart of; the message is ``parameter=value`` or the reason."""


def replays(*calls: str) -> Callable[[Replay], Replay]:
    """Register a function for calls, each ``topic/function`` or ``topic/*``."""

    def register(replay: Replay) -> Replay:
        for call in calls:
            if call in REPLAYS:
                raise ValueError(f"expected one replay for {call}, got two")
            REPLAYS[call] = replay
        return replay

    return register


def replay_of(case: Case) -> Replay:
    """Return the function that replays a case.

    Raises:
        NotOfferedError: if the library does not have the algorithm.
    """
    if case.algorithm in NOT_OFFERED:
        raise NotOfferedError(NOT_OFFERED[case.algorithm])
    names = [call for call in REPLAYS if call.startswith(f"{case.topic}/") and case.calls(call.split("/")[1])]
    for call in [*names, f"{case.topic}/*"]:
        if call in REPLAYS:
            return REPLAYS[call]
    raise NotOfferedError(f"topic={case.topic!r}")


def only(case: Case, **accepted: Any) -> None:
    """Raise a NotOfferedError that names a parameter whose value is neither None nor one of a tuple."""
    for name, values in accepted.items():
        value = case.params.get(name)
        if value is not None and value not in values:
            raise NotOfferedError(f"{name}={value!r}")


def without_effect(case: Case, *names: str) -> None:
    """Read parameters that the function of the other system ignores here, or whose effect an input contains."""
    for name in names:
        case.params.get(name)


def choose(case: Case, name: str, choices: Mapping[Any, Chosen], default: Any = None) -> Chosen:
    """Return the choice for the value of a parameter; a NotOfferedError names a value without one."""
    value = case.params.get(name, default)
    if value not in choices:
        raise NotOfferedError(f"{name}={value!r}")
    return choices[value]


INTERPOLATED = (
    "lightning-rl computes old log-probabilities exactly. This algorithm (A-3PO, arXiv:2512.06547) approximates them "
    "by an interpolation that depends on staleness"
)
NOT_OFFERED: dict[str, str] = {
    "decoupled_ppo_loglinear_proximal": INTERPOLATED,
    "proximal_logp_approximation": INTERPOLATED,
}
"""Algorithms that the library does not have, with the reason."""

NOT_COMPARED: dict[str, str] = {
    "m_*": "metrics that the other system logs in addition, with other definitions",
    "clipfrac": "not logged by the value loss, and by losses without a fraction of clipped tokens",
    "clip_ratio": "as for `clipfrac`",
    "pg_clipfrac": "as for `clipfrac`",
    "pg_clipfrac_lower": "as for `clipfrac`",
    "ppo_kl": "not compared in cases without the old policy",
    "padding_action_log_probs": "log-probabilities of padding are arbitrary, because no padding token is valid",
}
"""Fields that are left out where a replay gives no value for them, with the reason. Patterns of fnmatch."""


def not_compared(field: str) -> bool:
    """Return True if a field is left out where the replay returns no value for it."""
    return any(fnmatch(field, pattern) for pattern in NOT_COMPARED)
