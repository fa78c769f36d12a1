"""Limit: ends a call that does not come back, in place, by a timer of the kernel.

The timer is a POSIX timer with a real-time signal of its own where there is one, so rewards that use ``SIGALRM``
themselves neither lose their timer nor take this one away; elsewhere it is ``setitimer``. It goes off inside regular
expressions, sleeps and loops, and not inside of C code that never looks for signals.
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

AGAIN = 1.0  # seconds after which a call that swallowed the end of its time is told again
HURRY = 3.0  # seconds that a call has left when the run was told to stop
LAST = 15.0  # seconds more until the process is ended with a call that holds on


class TimeUpError(BaseException):
    """The time of a call is up. No Exception, so that ``except Exception`` in a reward does not keep it."""


class Timer(Protocol):
    """Sends a signal to this process after some seconds, and then every :data:`AGAIN` seconds."""

    signal: int

    def arm(self, seconds: float) -> None:
        """Starts it, or starts it anew; 0 stops it."""
        ...


class IntervalTimer:
    """``setitimer``, which a process has once."""

    signal = int(signal.SIGALRM)

    def arm(self, seconds: float) -> None:
        """Starts it, or starts it anew; 0 stops it."""
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
    """``timer_create``, of which a process may have many.

    Raises:
        OSError: if the system has none.
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
        """Starts it, or starts it anew; 0 stops it."""
        again = AGAIN if seconds else 0.0
        parts = [part for value in (again, seconds) for part in (int(value), int(value % 1 * 1e9))]
        self._library.timer_settime(self._timer, 0, (ctypes.c_long * 4)(*parts), None)


@dataclass(slots=True)
class Clock:
    """The one clock of a process for calls in its main thread.

    Attributes:
        timer: sends the signal; made by the first call, because timers do not survive a fork.
        running: whether a call has the clock.
        seconds: what the call was given.
        end: when its time is up.
        rings: how often the call was told so.
        stopped_by: the signal that told the run to stop, or 0.
        abandon: ends the process, given the reason and the exit status, if a call holds on for too long.
    """

    timer: Timer | None = None
    running: bool = False
    seconds: float = 0.0
    end: float = 0.0
    rings: int = 0
    stopped_by: int = 0
    abandon: Callable[[str, int], None] | None = None

    def run(self, function: Callable[[], Result], seconds: float | None) -> Result:
        """Calls the function. Only the main thread can be ended; in another one the function has all the time.

        What the function makes of the end of its time does not matter: one that swallows it is told again, ever sooner,
        and what it returns in spite of it is not taken.

        Args:
            function: without arguments.
            seconds: that it has; None for no limit, but a run that is told to stop ends it anyway.

        Raises:
            TimeUpError: if it took longer; the message says so.
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
                self.running = False  # what rings from here on is not heard
            if self.rings:
                raise TimeUpError(f"{self.reason()} and went on when told to end: put it into Isolated(...)")
            return result
        except TimeUpError as error:
            self.running, error.__context__ = False, None  # not every time that it was told before
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
        """Leaves the call that runs, and those to come, a few seconds, because a signal told the run to stop."""
        self.stopped_by = number
        if self.running and self.timer is not None and self.end > time.monotonic() + HURRY:
            self.end = time.monotonic() + HURRY
            self.timer.arm(HURRY)

    def reset(self) -> None:
        """Forgets the signal that told the run to stop, and what would end the process."""
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
            self.abandon(f"a reward {self.reason()}, but holds on: put it into Isolated(...)\n{where}", status)
        error, self.rings = TimeUpError(self.reason()), self.rings + 1
        self.timer.arm(_patience(self.rings))
        raise error

    def reason(self) -> str:
        """Why a call was ended, as the end of the sentence "reward x ..."."""
        if self.stopped_by:
            return f"was cut short, because {signal.Signals(self.stopped_by).name} told the run to stop"
        return f"took longer than {self.seconds:g} s"


CLOCK = Clock()


def _patience(rings: int) -> float:
    """Seconds until a call that was told so often is told again; in the end within any handler of an exception."""
    return AGAIN / 2 ** (rings - 1) if rings <= 3 else 2e-6 * 1.2 ** (rings % 24)


def _timer() -> Timer:
    try:
        return PosixTimer()
    except (OSError, AttributeError):
        return IntervalTimer()


def remaining(seconds: float | None) -> Any:
    """How long a wait may last at most: less once the run was told to stop."""
    if not CLOCK.stopped_by:
        return seconds
    return HURRY if seconds is None else min(seconds, HURRY)
