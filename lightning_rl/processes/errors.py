"""Failure of a call of user code."""

import traceback
from typing import Self

from lightning_rl.processes.worker import describe
from lightning_rl.utils.keys import hide_secrets

TIMEOUT, DEATH, LOADING, INTERRUPT, INVALID = "timeout", "lost process", "loading", "interrupt", "invalid"


class CallError(Exception):
    """Failure of a call of user code, here or in another process; secrets in its texts are hidden.

    Args:
        kind: Name of an exception, :data:`TIMEOUT`, :data:`DEATH`, :data:`LOADING` if the function could not be loaded
            in a process, or :data:`INTERRUPT` if a signal stopped the run.
        message: Description in one sentence; for a process the predicate, such as "was ended by SIGKILL".
        log: Traceback.
        error: Representation of the exception, or an empty string.
    """

    def __init__(self, kind: str, message: str, log: str = "", error: str = "") -> None:
        message, log, error = map(hide_secrets, (message, log, error))
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.log, self.error = kind, message, log, error

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the failure for an exception."""
        if isinstance(error, cls):
            return error
        text, representation = describe(error)
        return cls(type(error).__name__, text, "".join(traceback.format_exception(error)), representation)


class LostWorkerError(CallError):
    """Loss of a worker with its node or by another cause that is not the function's; the task can start over."""

    def __init__(self) -> None:
        super().__init__(DEATH, "was lost with its node")
