"""Record of a failure of user code that a sample needs: a reward function or an environment."""

from dataclasses import dataclass

from lightning_rl.utils.keys import hide_secrets


@dataclass(frozen=True)
class Failure:
    """Rows that a reward function failed to score, or an environment that failed: rows (3,), "raised KeyError('x')".

    Secrets in its texts are hidden.

    Attributes:
        rows: Row indices within the call; empty for an environment.
        cause: Predicate of the sentence "reward x ...", such as "took longer than 3 s".
        traceback: Traceback of the exception, or an empty string.
        kind: Class of the exception, such as "KeyError", or a kind of :mod:`lightning_rl.processes.errors`, such as
            "timeout".
    """

    rows: tuple[int, ...]
    cause: str
    traceback: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        """Hide secrets, since exceptions of clients quote requests."""
        for name in ("cause", "traceback"):
            object.__setattr__(self, name, hide_secrets(getattr(self, name)))
