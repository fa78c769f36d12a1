"""Failure of an environment."""

import re
import traceback
from dataclasses import dataclass

TIMEOUT, DEATH = "timeout", "lost process"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of an environment.

    Args:
        kind: Name of an exception, :data:`TIMEOUT` or :data:`DEATH`.
        message: Description in one sentence.
        log: Traceback, and the beginning and end of the output of an environment in a worker process.
    """

    kind: str
    message: str
    log: str = ""

    def __str__(self) -> str:
        """Return kind and message."""
        return f"{self.kind}: {self.message}"

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Return the failure for an exception of an environment."""
        if isinstance(error, EnvironmentFailureError):
            return error.failure
        return Failure(
            kind=type(error).__name__, message=words_of(error), log="".join(traceback.format_exception(error))
        )


class EnvironmentFailureError(Exception):
    """Failure of an environment in a worker process.

    Args:
        failure: Description of the failure.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def words_of(error: BaseException) -> str:
    """Return the text of an exception, even if its ``__str__`` fails, without memory addresses."""
    try:
        return ADDRESS.sub("", str(error))
    except BaseException as further:  # noqa: BLE001  code of the user
        return f"its text could not be made, which raised {type(further).__name__}"
