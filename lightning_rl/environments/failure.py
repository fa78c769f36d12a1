"""Failure: why an environment could not go on."""

import re
import traceback
from dataclasses import dataclass

TIMEOUT, DEATH = "timeout", "lost process"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an environment could not go on.

    Args:
        kind: the name of an exception, :data:`TIMEOUT` or :data:`DEATH`.
        message: what happened, in a sentence.
        log: the traceback, and what the environment printed if it ran in a process of its own: the first and the last
            of it.
    """

    kind: str
    message: str
    log: str = ""

    def __str__(self) -> str:
        """Kind and message."""
        return f"{self.kind}: {self.message}"

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Of what was raised where an environment was called."""
        if isinstance(error, EnvironmentFailureError):
            return error.failure
        return Failure(
            kind=type(error).__name__, message=words_of(error), log="".join(traceback.format_exception(error))
        )


class EnvironmentFailureError(Exception):
    """An environment in a process of its own could not go on.

    Args:
        failure: why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def words_of(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does, without addresses, which tell one cause in many ways."""
    try:
        return ADDRESS.sub("", str(error))
    except BaseException as further:  # noqa: BLE001  code of the user
        return f"its text could not be made, which raised {type(further).__name__}"
