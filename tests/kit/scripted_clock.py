"""ScriptedClock: real fits with a PacedEngine in a time that only the trainer's thread moves, from event to event."""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest
from lightning.pytorch import Callback
from typing_extensions import override

from benchmarks.paced import PacedEngine
from lightning_rl.generation import Request
from lightning_rl.rollouts import ahead
from lightning_rl.rollouts.ahead import Ahead

EOS = 1


class ScriptedClock:
    """Tells the trainer's thread and those ahead of it the same time, in which computing takes none.

    Attributes:
        engine: that draws by this clock.
        waits: for each rollout that the trainer has taken from those ahead, how long it waited for it.
        had: when it had it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        self.engine: PacedEngine | None = None
        self.waits, self.had = list[float](), list[float]()
        self._main, self._futures = threading.current_thread(), list[Future[Any]]()
        self._at_once = 1
        start = Ahead.start

        def noting(rollouts: Ahead, number: int, sampling: Any) -> None:
            start(rollouts, number, sampling)
            self._at_once = 1 + rollouts.max_staleness if rollouts.concurrent else 1
            samples = rollouts.pending()[number].samples
            assert samples is not None
            self._futures.append(samples)

        monkeypatch.setattr(Ahead, "start", noting)
        monkeypatch.setattr(ahead, "wait", self._wait_for)

    def drive(self, lengths: Sequence[Sequence[int]], **options: Any) -> PacedEngine:
        """An engine whose answers have the given lengths by rollout and place, and draws one token a second."""

        def script(request: Request) -> list[int]:
            place = request.sample_id % len(lengths[0])
            return [2 + request.sample_id % 5] * (lengths[request.rollout][place] - 1) + [EOS]

        self.engine = PacedEngine(script, 1.0, clock=self, **options)
        return self.engine

    @property
    def concurrent(self) -> bool:
        """True if the engine generates several rollouts at a time."""
        return self._at_once > 1

    def now(self) -> float:
        """The time, in seconds."""
        return self.time

    def wait(self, changed: threading.Condition, until: float) -> None:
        """The trainer's own draws and syncs take their time; other threads are woken."""
        if threading.current_thread() is not self._main:
            assert changed.wait(60), "the clock did not move"
        else:
            self.time = max(self.time, until)

    def trains(self, seconds: float) -> Callback:
        """A callback by which every optimizer step takes so long."""
        clock = self

        class Trains(Callback):
            @override
            def on_train_batch_end(self, *_: Any, **__: Any) -> None:
                clock.go_on(clock.time + seconds)

        return Trains()

    def go_on(self, to: float) -> None:
        """Lets time pass."""
        while self._next() <= to:
            self._move(self._next())
        self._move(to)

    def _wait_for(self, samples: Iterable[Future[Any]], patience: float) -> Any:
        """Wait function of the rollouts ahead."""
        begin, samples = self.time, list(samples)
        self._settle()
        while not all(future.done() for future in samples):
            self._move(self._next())
        self.waits.append(self.time - begin)
        self.had.append(self.time)
        return futures.wait(samples, patience)

    def _next(self) -> float:
        assert self.engine is not None
        with self.engine.changed:
            return self.engine.next_end()

    def _move(self, to: float) -> None:
        engine = self.engine
        assert engine is not None
        with engine.changed:
            self.time = to
            engine.advance()
        self._settle()

    def _settle(self) -> None:
        """Waits until every thread waits for the time: what can be asked is asked, what is answered is laid out."""
        engine, end = self.engine, time.monotonic() + 60
        assert engine is not None

        def settled() -> bool:
            done = sum(future.done() for future in self._futures)
            with engine.changed:
                drawing = len([call for call in engine.calls.values() if not all(answer.done for answer in call)])
            running = min(len(self._futures) - done, self._at_once)
            return drawing == running

        while not settled():
            assert time.monotonic() < end, "a thread neither draws nor ends"
            time.sleep(0.001)


def window(clock: ScriptedClock, max_staleness: int) -> tuple[float, float]:
    """Idle share and seconds of a rollout, without those in which the pipeline fills and runs dry."""
    drawn_by_itself = int(not clock.concurrent)  # the first one
    first, last = max_staleness + 1 - drawn_by_itself, len(clock.had) - 1 - max_staleness
    seconds = clock.had[last] - clock.had[first - 1]
    return sum(clock.waits[first : last + 1]) / seconds, seconds / (last - first + 1)
