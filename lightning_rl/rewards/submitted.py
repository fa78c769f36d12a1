"""Submitted: a call of a reward function that runs, here, in an event loop or in other processes."""

import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers import TrainerState

from lightning_rl.processes.errors import DEATH, INVALID, LOADING, CallError
from lightning_rl.processes.timeouts import CLOCK, RewardTimeoutError
from lightning_rl.rewards.reward_call import CallStyle, Reward
from lightning_rl.rewards.values import InvalidRewardError, values_of
from lightning_rl.samples import Failure, RewardCall, Rows
from lightning_rl.utils.event_loop import EventLoop
from lightning_rl.utils.torch_state import preserve_torch_state
from lightning_rl.utils.tracing import Span

LOOP = EventLoop("rewards")


@dataclass(slots=True)
class Submitted:
    """Call of a reward function that has not finished.

    Attributes:
        name: Name of the function.
        function: Reward function.
        rows: Arguments of the call.
        style: Calling convention of the function.
        values: Value of each row; NaN until the function has returned it.
        failures: Rows that the function failed to score.
        extras: Columns logged with ``log_extra``, one value per row.
        metrics: Numbers logged with ``log_metric``, by name, in order.
        seconds: Duration of the call.
        tasks: Results that are awaited, each with its rows.
        span: Span of the call.
    """

    name: str
    function: Reward
    rows: Rows
    style: CallStyle
    values: list[float | None] = field(init=False)
    failures: list[Failure] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    tasks: "list[tuple[tuple[int, ...], Future[Any]]]" = field(default_factory=list)
    span: Span = field(init=False)

    def __post_init__(self) -> None:
        """Begin without values."""
        self.values = [math.nan] * len(self.rows)
        attributes = {"gen_ai.evaluation.name": self.name, "lightning_rl.rows": len(self.rows)}
        self.span = Span(f"reward {self.name}", attributes)

    @classmethod
    def of(cls, name: str, function: Reward, rows: Rows) -> Self:
        """Return a call that has not begun.

        Raises:
            TypeError: If the signature of the function is not that of a reward.
        """
        return cls(name, function, rows, CallStyle.of(name, function, list(rows.columns)))

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Indices of all rows."""
        return tuple(range(len(self.rows)))

    def log_extra(self, column: str, values: Sequence[Any], rows: Sequence[int] | None = None) -> None:
        """Store a column beside the samples.

        Raises:
            ValueError: If the number of values is not the number of rows.
        """
        values, rows = list(values), self.all_rows if rows is None else rows
        if len(values) != len(rows):
            raise ValueError(f"expected {len(rows)} values in log_extra({column!r}, ...), got {len(values)}")
        stored = self.extras.setdefault(str(column), [None] * len(self.rows))
        for row, value in zip(rows, values, strict=True):
            stored[row] = value

    def log_metric(self, name: str, value: Any) -> None:
        """Add a number to the metric ``reward_metric/<function>/<name>``; a number that is not finite is dropped."""
        if math.isfinite(number := float(value)):
            self.metrics.setdefault(str(name), []).append(number)

    def begin(self, rows: Rows, state: TrainerState | None = None) -> Any:
        """Call the function on ``rows``, which it may edit, and return its result, which may be awaitable."""
        extras = {
            "trainer_state": state or TrainerState(),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }
        arguments, keywords = self.style.arguments(rows, extras)
        return self.function(*arguments, **keywords)

    def call(self, state: TrainerState | None, seconds: float | None) -> None:
        """Call the function in this process; a coroutine is started."""

        def result() -> Any:  # a generator runs here, within the time limit
            returned = self.begin(self.rows.copy(), state)
            return returned if inspect.isawaitable(returned) else values_of(returned, len(self.rows))

        with self.span.current():
            returned = self.store(self.all_rows, lambda: CLOCK.run(result, seconds))
            self.span.stop()
            if inspect.isawaitable(returned):
                self.tasks = [(self.all_rows, start(returned))]
                self.tasks[0][1].add_done_callback(self.span.stop)

    def collect(self, lost: "Sequence[Future[Any]]", late: str, kind: str, log: str = "") -> None:
        """Store the results of the tasks.

        Args:
            lost: Tasks without a result, which are cancelled; else the next call queues behind them.
            late: Cause of their failure.
            kind: Kind of their failure.
            log: Traceback of their failure.
        """
        for future in lost:
            future.cancel()
        for rows, future in self.tasks:
            if future in lost:
                self.failures.append(Failure(rows, late, log, kind))
            else:
                self.store(rows, partial(self._result, rows, future))

    def _result(self, rows: Sequence[int], future: "Future[Any]") -> list[float | None]:
        """Return the values of a task, and log its extras and metrics."""
        returned, columns, metrics = future.result()
        values = values_of(returned, len(rows))
        for column, items in columns:
            self.log_extra(column, items, rows)
        for name, number in metrics:
            self.log_metric(name, number)
        return values

    def store(self, rows: Sequence[int], call: Callable[[], Any]) -> Any:
        """Store the values that a function returns for some rows, or its failure; return its result."""
        begin = time.perf_counter()
        try:
            with preserve_torch_state():
                returned = call()
        except (KeyboardInterrupt, SIGTERMException):  # from a signal, not from the function
            raise
        except BaseException as error:  # noqa: BLE001  the boundary to foreign code, which may call exit() as well
            self.failures.append(failure_of(rows, error))
            return None
        finally:
            self.seconds += time.perf_counter() - begin
        if not inspect.isawaitable(returned):
            for row, value in zip(rows, returned, strict=True):
                self.values[row] = value
        return returned

    def finish(self) -> RewardCall:
        """Return the record of the call, with one failure per cause, and one for each value that is not finite."""
        known, failures = {row for failure in self.failures for row in failure.rows}, list(self.failures)
        for row, value in enumerate(self.values):
            if value is not None and not math.isfinite(value) and row not in known:
                failures.append(Failure((row,), f"returned {value}", kind=INVALID))
        merged: dict[str, Failure] = {}
        for failure in failures:
            first = merged.setdefault(failure.cause, replace(failure, rows=()))
            merged[failure.cause] = replace(first, rows=(*first.rows, *failure.rows))
        self.span.end(next((failure.kind for failure in failures), ""))
        return RewardCall(
            self.name,
            self.rows.completion_ids,
            self.values,
            self.seconds,
            self.rows.prompts,
            self.rows.completions,
            self.rows.columns,
            self.function,
            list(merged.values()),
            self.extras,
            self.metrics,
        )


def start(awaitable: Awaitable[Any]) -> "Future[Any]":
    """Start an awaitable in the event loop; return the future of its result, as one of :func:`.with_notes`."""

    async def result() -> Any:
        return await awaitable, (), ()

    return LOOP.start(result())


def return_alone(name: str, function: Reward, rows: Rows) -> Any:
    """Return the unchecked result of a function outside of a run; it may raise or edit the rows."""
    returned = Submitted.of(name, function, rows).begin(rows)
    return start(returned).result()[0] if inspect.isawaitable(returned) else returned


def failure_of(rows: Sequence[int], error: BaseException) -> Failure:
    """Return the failure of some rows for an error of a reward function."""
    trace, kind = "".join(traceback.format_exception(error)), type(error).__name__
    if isinstance(error, RewardTimeoutError):
        cause, kind = str(error), error.kind
    elif isinstance(error, InvalidRewardError):
        cause, kind = f"returned invalid rewards: {error}", INVALID
    elif isinstance(error, CallError):
        cause = f"raised {error.error}" if error.error else error.message
        if error.kind == DEATH:
            cause = f"lost its process, which {error.message}"
        if error.kind == LOADING:
            cause = f"could not be loaded in a process: {error.message}"
        trace, kind = error.log, error.kind
    else:
        cause = f"raised {error!r:.500}"
    return Failure(tuple(rows), cause, trace, kind)
