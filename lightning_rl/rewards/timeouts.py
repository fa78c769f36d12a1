"""Time limit of a reward call in the main thread, by a kernel timer.

The timer is a POSIX timer with a real-time signal where available, so it does not conflict with rewards that use
``SIGALRM``; elsewhere it is ``setitimer``. It interrupts regular expressions, sleeps and loops, but not C code that
never checks for signals.
"""

import ctypes
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

AGAIN = 1.0  # seconds between timeout signals
HURRY = 3.0  # seconds that a call may take after a signal stopped the run
LAST = 15.0  # further seconds before the process is ended


class RewardTimeoutError(BaseException):
    """Time limit exceeded; a BaseException, so that ``except Exception`` in a reward does not catch it."""


class Timer(Protocol):
    """Timer that sends a signal to this process after some seconds, and then every :data:`AGAIN` seconds."""

    signal: int

    def arm(self, seconds: float) -> None:
        """Start or restart the timer; 0 stops it."""
        ...


class IntervalTimer:
    """``setitimer``, one per process."""

    signal = int(signal.SIGALRM)

    def arm(self, seconds: float) -> None:
        """Start or restart the timer; 0 stops it."""
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN if seconds else 0.0)


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0 is SIGEV_SIGNAL
        ("rest", ctypes.c_char * 48),
    )


class PosixTimer:
    """``timer_create``, any number per process.

    Raises:
        OSError: If the system does not support it.
    """

    def __init__(self) -> None:
        self.signal = signal.SIGRTMAX - 3
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(signo=self.signal)
        if not hasattr(self._library, "timer_create"):
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)  # before glibc 2.34
        if self._library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def arm(self, seconds: float) -> None:
        """Start or restart the timer; 0 stops it."""
        again = AGAIN if seconds else 0.0
        parts = [part for value in (again, seconds) for part in (int(value), int(value % 1 * 1e9))]
        self._library.timer_settime(self._timer, 0, (ctypes.c_long * 4)(*parts), None)


@dataclass(slots=True)
class Clock:
    """Time limit of the calls in the main thread.

    Attributes:
        timer: Sends the signal; created by the first call, because timers do not survive a fork.
        running: True while a call uses the clock.
        seconds: Time limit of the call.
        end: Deadline of the call.
        rings: Number of timeout signals sent to the call.
        stopped_by: Signal that stopped the run, or 0.
        abandon: Function of reason and exit status that ends the process if a call does not return.
    """

    timer: Timer | None = None
    running: bool = False
    seconds: float = 0.0
    end: float = 0.0
    rings: int = 0
    stopped_by: int = 0
    abandon: Callable[[str, int], None] | None = None

    def run(self, function: Callable[[], Result], seconds: float | None) -> Result:
        """Call the function and return its result; outside of the main thread there is no limit.

        A function that catches the timeout gets it again at ever shorter intervals, and its result is dropped.

        Args:
            function: Function without arguments.
            seconds: Time limit; None for no limit except after a signal stops the run.

        Raises:
            RewardTimeoutError: If the call took longer.
        """
        if threading.current_thread() is not threading.main_thread() or self.running:
            return function()
        timer = self.timer = self.timer or _timer()
        before = signal.signal(timer.signal, self._ring)
        try:
            try:
                self._begin(timer, seconds)
                result = function()
            finally:
                self.running = False  # ignore later signals
            if self.rings:
                raise RewardTimeoutError(f"{self.reason()} and caught the timeout: wrap it in SubprocessReward(...)")
            return result
        except RewardTimeoutError as error:
            self.running, error.__context__ = False, None  # drop the chain of earlier timeouts
            raise
        finally:
            timer.arm(0.0)
            signal.signal(timer.signal, before)

    def _begin(self, timer: Timer, seconds: float | None) -> None:
        self.seconds = float("inf") if seconds is None else seconds
        left = min(self.seconds, HURRY) if self.stopped_by else self.seconds
        self.end, self.rings, self.running = time.monotonic() + left, 0, True
        timer.arm(min(left, 1e6))

    def stop(self, number: int) -> None:
        """Limit the current and later calls to :data:`HURRY` seconds, because a signal stopped the run."""
        self.stopped_by = number
        if self.running and self.timer is not None and self.end > time.monotonic() + HURRY:
            self.end = time.monotonic() + HURRY
            self.timer.arm(HURRY)

    def reset(self) -> None:
        """Clear the signal that stopped the run, and ``abandon``."""
        self.stopped_by, self.abandon = 0, None

    def _ring(self, number: int, frame: FrameType | None) -> None:
        del number
        late = time.monotonic() - self.end
        if not self.running or late < -0.01 or self.timer is None:
            return
        if self.abandon is not None and late > (LAST if self.stopped_by else max(LAST, 10 * self.seconds)):
            self.running = False
            where = "".join(traceback.format_stack(frame))
            status = 128 + self.stopped_by if self.stopped_by else 1
            self.abandon(
                f"a reward {self.reason()} and does not return: wrap it in SubprocessReward(...)\n{where}", status
            )
        error, self.rings = RewardTimeoutError(self.reason()), self.rings + 1
        self.timer.arm(_patience(self.rings))
        raise error

    def reason(self) -> str:
        """Return the cause of the timeout as the predicate of "reward x ..."."""
        if self.stopped_by:
            return f"was interrupted, because {signal.Signals(self.stopped_by).name} stopped the run"
        return f"took longer than {self.seconds:g} s"


CLOCK = Clock()


def _patience(rings: int) -> float:
    """Return the delay before the next timeout signal; it shrinks with every retry."""
    return AGAIN / 2 ** (rings - 1) if rings <= 3 else 2e-6 * 1.2 ** (rings % 24)


def _timer() -> Timer:
    try:
        return PosixTimer()
    except (OSError, AttributeError):
        return IntervalTimer()


def remaining(seconds: float | None) -> Any:
    """Return the remaining time limit, which is shorter after a signal stopped the run."""
    if not CLOCK.stopped_by:
        return seconds
    return HURRY if seconds is None else min(seconds, HURRY)
