"""PacedEngine: answers at the pace of devices that are not there, and the model of them that plans are made with."""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.generation.engine import Capabilities, Completion, EngineError, Request
from lightning_rl.generation.fake import FakeEngine, Script

CACHES = 64.0  # responses whose caches take as long to read as the weights; a model of 7B at 2,000 tokens, calculated
Key = TypeVar("Key", bound=Hashable)
NOTHING = 1e-3  # tokens; what is left of a response that has ended, by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast devices decode: a step draws a token of each of n responses and takes ``fixed + n * each`` seconds.

    Args:
        devices: each with a copy of the weights.
        slots: responses that a device decodes together at most.
        fixed: seconds for reading the weights.
        each: seconds for reading the cache of one response.

    Raises:
        ValueError: if one of them is out of range.
    """

    devices: int = 1
    slots: int = 256
    fixed: float
    each: float

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_counts(1, devices=self.devices, slots=self.slots)
        check_numbers(above=0, finite=True, fixed=self.fixed)
        check_numbers(at_least=0, finite=True, each=self.each)

    @staticmethod
    def of(tokens_per_second: float, *, alone: float | None = None, devices: int = 1, slots: int = 256) -> "Pace":
        """The pace of devices by what was measured.

        Args:
            tokens_per_second: of a device with all its slots taken.
            alone: tokens per second of a single response; by default reading the weights takes as long as reading
                the caches of :data:`CACHES` responses.
            devices: how many.
            slots: of each.

        Raises:
            ValueError: if a response alone is said to be faster than all together, or slower than its share of them.
        """
        check_numbers(above=0, finite=True, tokens_per_second=tokens_per_second)
        full = slots / tokens_per_second
        if alone is None or slots == 1:
            each = full / (CACHES + slots)
            return Pace(devices=devices, slots=slots, fixed=full - slots * each, each=each)
        check_numbers(above=tokens_per_second / slots, at_most=tokens_per_second, finite=True, alone=alone)
        each = (full - 1 / alone) / (slots - 1)
        return Pace(devices=devices, slots=slots, fixed=1 / alone - each, each=each)

    def step(self, number: int) -> float:
        """Seconds of a step that decodes ``number`` responses."""
        return self.fixed + number * self.each


@dataclass(slots=True, eq=False)
class _Device(Generic[Key]):
    """One device: how far its steps are, and at which one each of its responses ends."""

    steps: float = 0.0
    since: float = 0.0  # when it was there
    ends: list[tuple[float, int, Key]] = field(default_factory=list)  # a heap


class Decoding(Generic[Key]):
    """Responses that devices decode, event by event, in a time of its own.

    Args:
        pace: of the devices.

    Attributes:
        now: the time.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace, self.now = pace, 0.0
        self._devices = [_Device[Key]() for _ in range(pace.devices)]
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, Key, int]] = []
        self._begun: dict[Key, tuple[_Device[Key], float]] = {}  # where, and at which of its steps
        self._events: list[tuple[float, int, _Device[Key]]] = []  # a heap; one that is out of date does not harm

    def ask(self, key: Key, tokens: int, rank: int = 0) -> None:
        """Has a response of so many tokens decoded, after all that wait with a lower rank, or the same and longer."""
        heapq.heappush(self._waiting, (rank, next(self._numbers), key, tokens))
        self._fill()

    def next(self) -> float:
        """When the next response ends, unless others join it, or earlier; infinity if there is none."""
        return self._events[0][0] if self._events else math.inf

    def advance(self, to: float) -> list[Key]:
        """Goes on to a time, and says which responses have ended, in their order."""
        ended = list[Key]()
        while self.next() <= to:
            when, _, device = heapq.heappop(self._events)
            self.now = max(self.now, when)
            self._move(device)
            before = len(ended)
            while device.ends and device.ends[0][0] <= device.steps + NOTHING:
                key = heapq.heappop(device.ends)[2]
                del self._begun[key]
                ended.append(key)
            if len(ended) > before:
                self._foresee(device)
                self._fill()
        self.now = max(self.now, to)
        return ended

    def skip(self, to: float) -> None:
        """Goes on to a time in which nothing was decoded."""
        for device in self._devices:
            self._move(device)
            device.since = to
        self.now, self._events = to, []
        for device in self._devices:
            self._foresee(device)

    def lengths(self) -> dict[Key, int]:
        """How many tokens there are of each response that is being decoded."""
        for device in self._devices:
            self._move(device)
        return {key: int(device.steps - begun + NOTHING) for key, (device, begun) in self._begun.items()}

    def _fill(self) -> None:
        while self._waiting:
            device = min(self._devices, key=lambda device: len(device.ends))
            if len(device.ends) >= self.pace.slots:
                return
            _, number, key, tokens = heapq.heappop(self._waiting)
            self._move(device)
            self._begun[key] = device, device.steps
            heapq.heappush(device.ends, (device.steps + tokens, number, key))
            self._foresee(device)

    def _move(self, device: _Device[Key]) -> None:
        if device.ends:
            device.steps += (self.now - device.since) / self.pace.step(len(device.ends))
        device.since = self.now

    def _foresee(self, device: _Device[Key]) -> None:
        """Notes when the next response of a device ends if nothing joins."""
        if device.ends:
            left = max(device.ends[0][0] - device.steps, 0.0)
            when = self.now + left * self.pace.step(len(device.ends))
            heapq.heappush(self._events, (when, next(self._numbers), device))


class Clock(Protocol):
    """What a :class:`PacedEngine` tells the time by."""

    def now(self) -> float:
        """The time, in seconds."""
        ...

    def wait(self, changed: threading.Condition, until: float) -> None:
        """Waits until a time, or until it is notified of a change."""
        ...


class WallClock:
    """The clock on the wall."""

    def now(self) -> float:
        """The time, in seconds."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, until: float) -> None:
        """Waits until a time, or until it is notified of a change."""
        left = until - self.now()
        changed.wait(None if math.isinf(left) else max(left, 0.0))


@dataclass(slots=True, eq=False)
class _Call:
    """Requests that one thread waits for: how many are not answered, and from which token on each has which version."""

    left: int
    cuts: dict[int, list[tuple[int, int]]]


class PacedEngine(FakeEngine):
    """Answers from a script, and each answer when devices of some pace would have drawn it; takes weights meanwhile.

    Several threads may ask at a time. Tokens carry the version of the weights of the moment they are drawn in.

    Args:
        script: from a request to token ids, as for :class:`FakeEngine`.
        pace: of the devices.
        sync_seconds: that a sync takes, in which nothing is drawn.
        clock: to tell the time by; that on the wall by default.
        concurrent: False for an engine that is asked by one thread at a time.

    Attributes:
        asked: how many rollouts it was asked for.
    """

    def __init__(
        self,
        script: Script,
        pace: Pace,
        *,
        sync_seconds: float = 0.0,
        clock: Clock | None = None,
        concurrent: bool = True,
    ) -> None:
        super().__init__(script)
        self.capabilities = Capabilities(syncs_while_generating=True, concurrent=concurrent, cuts_short=True)
        self.pace, self.sync_seconds, self.clock = pace, sync_seconds, clock or WallClock()
        self.asked = 0
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._decoding, self._open = Decoding[int](self.pace), dict[int, tuple[Request, _Call]]()
        self._decoding.skip(self.clock.now())
        self._loaded, self._syncing, self._closed = -1, False, False

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._reset()

    @override
    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super()._take(weights, version)
        with self._changed:
            self._advance()
            self._syncing, end = True, self.clock.now() + self.sync_seconds
            while self.clock.now() < end:
                self.clock.wait(self._changed, end)
            self._decoding.skip(self.clock.now())
            self._syncing, self._loaded = False, version
            for key, drawn in self._decoding.lengths().items():
                request, call = self._open[key]
                call.cuts[id(request)].append((drawn, version))
            self._changed.notify_all()

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        completions = super()._draw(requests, logprobs=logprobs)
        call = _Call(len(requests), {id(request): [(0, self._loaded)] for request in requests})
        with self._changed:
            self._advance()
            for request, completion in zip(requests, completions, strict=True):
                self._open[id(request)] = request, call
                self._decoding.ask(id(request), len(completion.token_ids), request.rollout)
            self.asked += 1
            self._changed.notify_all()
            while call.left:
                if self._closed:
                    raise EngineError("expected to draw to the end, got an engine that was closed meanwhile")
                self.clock.wait(self._changed, math.inf if self._syncing else self._decoding.next())
                self._advance()
        return [
            replace(
                completion, version=call.cuts[id(request)][0][1], versions=_versions(call.cuts[id(request)], completion)
            )
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _advance(self) -> None:
        """Takes what has ended by now out of flight."""
        if self._syncing:
            return
        ended = self._decoding.advance(self.clock.now())
        for key in ended:
            request, call = self._open.pop(key)
            call.left -= 1
            self.in_flight.discard(request)
        if ended:
            self._changed.notify_all()

    @override
    def close(self) -> None:
        """Cuts short whoever waits."""
        super().close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _versions(cuts: Sequence[tuple[int, int]], completion: Completion) -> tuple[int, ...]:
    """The version of each token, by the places from which on there is another one."""
    ends = [*(begin for begin, _ in cuts[1:]), len(completion.token_ids)]
    return tuple(
        version
        for (begin, version), end in zip(cuts, ends, strict=True)
        for _ in range(begin, min(end, len(completion.token_ids)))
    )
