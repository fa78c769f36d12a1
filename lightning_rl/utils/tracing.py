"""Spans of OpenTelemetry, named by its conventions for generative AI; they do nothing without opentelemetry-api.

Attributes are names, numbers and kinds of errors, never texts of prompts, answers or errors.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from typing import Any, Self

from lightning_rl.version import __version__

try:
    from opentelemetry import context, propagate, trace

    INSTALLED = True
except ImportError:
    INSTALLED = False


class SystemIds:
    """Ids of spans from the operating system, as ``id_generator`` of a ``TracerProvider``.

    The SDK's own generator draws from Python's, which every step of a run seeds: runs would repeat ids.
    """

    def generate_span_id(self) -> int:
        """Return an id of 64 bits."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return an id of 128 bits."""
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """Return True."""
        return True


@cache
def tracer_of(provider: "trace.TracerProvider") -> "trace.Tracer":
    """Return the tracer of the library, with :class:`SystemIds` instead of the SDK's generator of ids."""
    tracer: Any = provider.get_tracer("lightning_rl", __version__)
    if type(getattr(tracer, "id_generator", None)).__name__ == "RandomIdGenerator":
        tracer.id_generator = SystemIds()
    return tracer


class Span:
    """Child of the span that is current at its construction; it may start and end in other threads and coroutines.

    As a context manager it starts and ends.

    Args:
        name: Name of few values, such as ``"execute_tool add"``.
        attributes: Attributes by name.
    """

    def __init__(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
        self._name, self._attributes = name, attributes
        self._end: int | None = None
        self._parent = context.get_current() if INSTALLED else None
        self._span: trace.Span | None = None

    def start(self) -> Self:
        """Start the span, unless it has started."""
        if INSTALLED and self._span is None:
            tracer = tracer_of(trace.get_tracer_provider())
            self._span = tracer.start_span(self._name, self._parent, attributes=self._attributes)
        return self

    @contextmanager
    def current(self) -> Iterator[None]:
        """Start the span, unless it has started, and make it the parent of the spans of a block, without an end."""
        self.start()
        token = None if self._span is None else context.attach(trace.set_span_in_context(self._span, self._parent))
        try:
            yield
        finally:
            if token is not None:
                context.detach(token)

    def stop(self, *_: object) -> None:
        """Set the time at which a later :meth:`end` ends the span."""
        self._end = time.time_ns()

    def end(self, error: BaseException | str | None = None, attributes: Mapping[str, Any] | None = None) -> None:
        """End the span, unless it has ended, with further attributes and an error or the kind of one."""
        if self._span is not None and self._span.is_recording():
            self._span.set_attributes(attributes or {})
            if error:
                self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
                self._span.set_status(trace.StatusCode.ERROR)
            self._span.end(self._end)

    def __enter__(self) -> None:
        """Start the span."""
        self._block = self.current()
        self._block.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        """End the span, with the error of the block if there is one."""
        self._block.__exit__(None, None, None)
        self.end(error)


class RolloutSpans:
    """Spans of rollouts by number, children of the span that is current at the construction of this object."""

    def __init__(self, rank: int = 0) -> None:
        self._rank, self._context, self._open = rank, copy_context(), dict[int, Span]()

    def __reduce__(self) -> tuple[type["RolloutSpans"], tuple[int]]:
        """Copy the rank alone, because spans belong to one run."""
        return type(self), (self._rank,)

    def of(self, number: int) -> Span:
        """Return the span of a rollout, which starts at the first call."""
        if number not in self._open:
            attributes = {"lightning_rl.rollout": number, "lightning_rl.rank": self._rank}
            self._open[number] = self._context.run(Span, "rollout", attributes).start()
        return self._open[number]

    def end(self, *numbers: int, error: BaseException | None = None) -> None:
        """End the spans of rollouts, with an error if there is one; of all rollouts without a number."""
        for number in set(numbers or self._open) & self._open.keys():
            self._open.pop(number).end(error)


def carrier() -> dict[str, str]:
    """Return headers that name the current span in another process; none if there is no span."""
    headers = dict[str, str]()
    if INSTALLED:
        propagate.inject(headers)
    return headers
