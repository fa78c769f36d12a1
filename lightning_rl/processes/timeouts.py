"""Time limit of a reward call in the main thread, by ``SIGALRM``.

The signal interrupts regular expressions, sleeps and loops, but not C code that never checks for signals. A reward that
sets an alarm itself ends the limit of its call.
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from lightning_rl.processes.errors import INTERRUPT, TIMEOUT

Result = TypeVar("Result")

HURRY = 3.0  # seconds that a call may take after a signal stopped the run
LONGEST = 1e6  # seconds; timers accept no more


class RewardTimeoutError(BaseException):
    """Time limit exceeded; a BaseException, so that ``except Exception`` in a reward does not catch it.

    Args:
        message: Predicate of "reward x ...".
        kind: :data:`.errors.TIMEOUT`, or :data:`.errors.INTERRUPT` if a signal stopped the run.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Clock:
    """Time limit of the calls in the main thread.

    Attributes:
        running: True while a call uses the clock.
        seconds: Time limit of the call.
        stopped_by: Signal that stopped the run, or 0.
    """

    running: bool = False
    seconds: float = 0.0
    stopped_by: int = 0

    def run(self, function: Callable[[], Result], seconds: float | None) -> Result:
        """Call the function and return its result; outside of the main thread there is no limit.

        The result of a function that catches the timeout is dropped.

        Args:
            function: Function without arguments.
            seconds: Time limit; None for no limit except after a signal stops the run.

        Raises:
            RewardTimeoutError: If the call took longer.
        """
        if threading.current_thread() is not threading.main_thread() or self.running:
            return function()
        before = signal.signal(signal.SIGALRM, self._ring)
        self.seconds = float("inf") if seconds is None else seconds
        try:
            self.running = True
            _set_timer(remaining(seconds))
            result = function()
            if not self.running:
                raise self._error(" and caught the timeout: wrap it in SubprocessReward(...)")
            return result
        finally:
            self.running = False
            _set_timer(None)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)

    def stop(self, number: int) -> None:
        """Limit the current and later calls to :data:`HURRY` seconds, because a signal stopped the run."""
        self.stopped_by = number
        if self.running:
            _set_timer(remaining(self.seconds))

    def reset(self) -> None:
        """Clear the signal that stopped the run."""
        self.stopped_by = 0

    def _ring(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.running:
            self.running = False
            raise self._error()

    def _error(self, remark: str = "") -> RewardTimeoutError:
        return RewardTimeoutError(f"{self.reason()}{remark}", INTERRUPT if self.stopped_by else TIMEOUT)

    def reason(self) -> str:
        """Return the cause of the timeout as the predicate of "reward x ..."."""
        if self.stopped_by:
            return f"was interrupted, because {signal.Signals(self.stopped_by).name} stopped the run"
        return f"took longer than {self.seconds:g} s"


CLOCK = Clock()


def remaining(seconds: float | None) -> Any:
    """Return the time limit in seconds, which is shorter after a signal stopped the run; None for no limit."""
    if CLOCK.stopped_by:
        return HURRY if seconds is None else min(seconds, HURRY)
    return None if seconds is None else min(seconds, LONGEST)


def _set_timer(seconds: float | None) -> None:
    """Send the signal after some seconds; never for None."""
    signal.setitimer(signal.ITIMER_REAL, 0.0 if seconds is None else seconds)
