"""Which function replays which algorithm, and what is knowingly left out."""

from collections.abc import Callable
from fnmatch import fnmatch

from goldens.cases import Case, Outputs

Replay = Callable[[Case], Outputs]

REPLAYS: dict[str, Replay] = {}
"""By the name of the algorithm, by ``topic/algorithm`` where one name means two things, ``topic/*`` for the others."""


class NotOfferedError(Exception):
    """Raised for an algorithm that the library has no counterpart of; the message is the reason."""


def replays(*algorithms: str) -> Callable[[Replay], Replay]:
    """Registers a function for algorithms."""

    def register(replay: Replay) -> Replay:
        for algorithm in algorithms:
            if algorithm in REPLAYS:
                raise ValueError(f"expected one replay for {algorithm}, got two")
            REPLAYS[algorithm] = replay
        return replay

    return register


def replay_of(case: Case) -> Replay:
    """The function for a case.

    Raises:
        NotOfferedError: if the library does not have the algorithm.
    """
    if case.algorithm in NOT_OFFERED:
        raise NotOfferedError(NOT_OFFERED[case.algorithm])
    names = (f"{case.topic}/{case.algorithm}", case.algorithm, f"{case.topic}/*")
    return next(REPLAYS[name] for name in names if name in REPLAYS)


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
