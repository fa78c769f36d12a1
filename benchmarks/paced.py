"""PacedEngine: answers from a script at the pace of devices, for runs that generate ahead."""

import math
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from lightning_rl.generation import Completion, EngineError, Request
from lightning_rl.generation.engine import Capabilities
from lightning_rl.generation.fake import FakeEngine, Script

ROUNDING = 1e-6  # tokens


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    def wait(self, changed: threading.Condition, until: float) -> None:
        """Wait until a time, or until the condition is notified."""
        ...


class WallClock:
    """The time of the machine."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, until: float) -> None:
        """Wait until a time, or until the condition is notified."""
        changed.wait(None if math.isinf(until) else max(until - self.now(), 0.0))


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that is being drawn, in steps of the engine."""

    request: Request
    begin: float
    tokens: int
    cuts: list[tuple[int, int]] = field(default_factory=list)  # a place, and the version of the tokens from there on
    done: bool = False

    def versions(self) -> tuple[int, ...]:
        """Return the version of each token."""
        ends = [*self.cuts, (self.tokens, 0)]
        return tuple(version for (place, version), (end, _) in pairwise(ends) for _ in range(place, end))


class PacedEngine(FakeEngine):
    """Engine that samples one token of every answer in flight per step, and receives weights between steps.

    Args:
        script: Returns the token ids of a request.
        seconds: Seconds of a step.
        sync_seconds: Seconds of a sync, in which no token is drawn.
        clock: Source of time.
        concurrent: False for an engine that draws one rollout at a time.

    Attributes:
        asked: Number of rollouts that were asked for.
    """

    def __init__(
        self,
        script: Script,
        seconds: float,
        *,
        sync_seconds: float = 0.0,
        clock: Clock | None = None,
        concurrent: bool = True,
    ) -> None:
        super().__init__(script)
        self.capabilities = Capabilities(syncs_while_generating=True, concurrent=concurrent, cuts_short=True)
        self.seconds, self.sync_seconds, self.clock = seconds, sync_seconds, clock or WallClock()
        self.changed = threading.Condition()
        self.asked = 0
        self.calls: dict[int, list[_Answer]] = {}
        self._paused, self._syncing, self._closed, self._loaded = 0.0, False, False, -1

    def next_end(self) -> float:
        """Return the time at which the next answer ends; infinity if none is in flight."""
        ends = [answer.begin + answer.tokens for answer in self._answers()]
        return math.inf if self._syncing or not ends else self._paused + min(ends) * self.seconds

    def advance(self) -> None:
        """Take the answers that have ended out of flight."""
        for answer in () if self._syncing else self._answers():
            if answer.begin + answer.tokens <= self._step() + ROUNDING:
                answer.done = True
                self.in_flight.discard(answer.request)
        self.changed.notify_all()

    def _answers(self) -> list[_Answer]:
        return [answer for call in self.calls.values() for answer in call if not answer.done]

    def _step(self) -> float:
        return (self.clock.now() - self._paused) / self.seconds

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_stream(weights, version)
        with self.changed:
            self.advance()
            step, begin = self._step(), self.clock.now()
            self._syncing = True
            while self.clock.now() < begin + self.sync_seconds:
                self.clock.wait(self.changed, begin + self.sync_seconds)
            self._paused += self.clock.now() - begin
            self._syncing, self._loaded = False, version
            for answer in self._answers():
                answer.cuts.append((int(step - answer.begin + ROUNDING), version))
            self.changed.notify_all()

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        completions = super().generate_batch(requests, logprobs=logprobs)
        with self.changed:
            self.advance()
            number, step = self.asked, self._step()
            self.asked += 1
            answers = [
                _Answer(request, step, len(completion.token_ids), [(0, self._loaded)])
                for request, completion in zip(requests, completions, strict=True)
            ]
            self.calls[number] = answers
            self.changed.notify_all()
            while not all(answer.done for answer in answers):
                if self._closed:
                    raise EngineError("expected to draw to the end, got an engine that was closed meanwhile")
                self.clock.wait(self.changed, self.next_end())
                self.advance()
            del self.calls[number]
        versions = [answer.versions() for answer in answers]
        return [replace(one, version=v[0], versions=v) for one, v in zip(completions, versions, strict=True)]

    @override
    def close(self) -> None:
        """Cuts short what is in flight."""
        super().close()
        with self.changed:
            self._closed = True
            self.changed.notify_all()


def lognormal_lengths(samples: int, rollouts: int, *, mean: float, sigma: float, limit: int) -> list[list[int]]:
    """Return lengths of answers from a lognormal distribution.

    Args:
        samples: Answers of a rollout.
        rollouts: Number of rollouts.
        mean: Mean length, before the limit.
        sigma: Standard deviation of the logarithm.
        limit: Largest length.
    """
    generator, mu = random.Random(3), math.log(mean) - sigma**2 / 2
    lengths = [round(generator.lognormvariate(mu, sigma)) for _ in range(samples * rollouts)]
    lengths = [min(limit, max(1, length)) for length in lengths]
    return [lengths[first : first + samples] for first in range(0, len(lengths), samples)]
