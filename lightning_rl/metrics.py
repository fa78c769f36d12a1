"""Metrics: statistics that merge over microbatches, steps and ranks, phase times, and logging."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_rl.corrections import Stat
from lightning_rl.corrections.stat import StatReduction, merge_moments, reduce_moments, stack_moments
from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.monitors import publish
from lightning_rl.utils.tracing import Span

LIGHTNINGS_DEFAULT = 50  # default of log_every_n_steps, with which one row per rollout is logged here
warnings.filterwarnings("ignore", message=r"The number of training batches .* log_every_n_steps=50")
# A checkpoint of every n-th step is to resume from, so it holds the weights after the step.
warnings.filterwarnings("ignore", message=r"Using ModelCheckpoint with manual optimization")


@dataclass(slots=True)
class Columns:
    """Keys of the moments, outside of the metric module because setting module attributes is slow.

    Attributes:
        keys: Key of each row.
        reductions: Reduction of each row.
        published: True if the next update resets the metric.
        restored: True if the state is from a checkpoint.
    """

    keys: tuple[str, ...] = ()
    reductions: tuple[StatReduction, ...] = ()
    published: bool = False
    restored: bool = False


class RunningStats(Metric):
    """Metric that merges statistics with fixed keys, with one ``[K, 4]`` state and one collective per sync.

    After :meth:`MetricLog.row` values stay readable until the next update, which resets the metric.
    """

    full_state_update = False
    moments: Tensor

    def __init__(self, collectives: Collectives = ALONE) -> None:
        super().__init__(process_group=collectives.rows, distributed_available_fn=lambda: collectives.ranks > 1)
        self.columns, self._alone = Columns(), collectives.ranks == 1
        self.add_state("moments", torch.zeros(0, 4, dtype=torch.float64), dist_reduce_fx=merge_moments)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the statistics, in order."""
        return self.columns.keys

    @override
    def update(self, stats: Mapping[str, Stat]) -> None:
        """Merge the given populations into the state."""
        self.join(stats)

    def join(self, stats: Mapping[str, Stat]) -> None:
        """Merge as :meth:`update` does, without torchmetrics' wrapper."""
        columns, keys = self.columns, tuple(stats)
        new = stack_moments(tuple(stats.values()), self.moments.device)
        if columns.restored and keys != columns.keys:  # resumed with other corrections: drop unlogged values
            columns.keys = ()
        if columns.keys and keys != columns.keys:
            difference = sorted(set(keys) ^ set(columns.keys))
            raise ValueError(f"expected the same metrics at every call, got a change of {', '.join(difference)}")
        reset = columns.published or not columns.keys
        columns.keys, columns.reductions = keys, tuple(stat.reduction for stat in stats.values())
        columns.published = columns.restored = False
        self.moments = new if reset else merge_moments(torch.stack([self.moments, new]))

    @override
    def compute(self) -> Tensor:
        """Return the moments of each key over all ranks, shape [K, 4]."""
        return self.moments

    def figures(self) -> dict[str, float]:
        """Return the value of each key with a population, over all ranks. A collective."""
        if self._alone:
            moments = self.moments
        else:
            self._computed, self._update_count = None, 1  # torchmetrics caches until the next update
            moments = self.compute()
        return _figures(self.columns, moments)

    def state(self) -> dict[str, Any]:
        """Return a checkpointable state of plain types."""
        columns = self.columns
        named = {"keys": list(columns.keys), "reductions": list(columns.reductions), "published": columns.published}
        return {**named, "moments": self.moments.cpu().clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state`."""
        self.columns = Columns(tuple(state["keys"]), tuple(state["reductions"]), state["published"], restored=True)
        self.moments = state["moments"].to(self.device)


def _figures(columns: Columns, moments: Tensor) -> dict[str, float]:
    """Return the value of each key with a population."""
    rows = moments.reshape(-1, 4).tolist()  # torchmetrics squeezes a single row
    values = {
        key: reduce_moments(row, reduction)
        for key, reduction, row in zip(columns.keys, columns.reductions, rows, strict=True)
    }
    return {key: value for key, value in values.items() if not math.isnan(value)}


class GrowingStats(RunningStats):
    """RunningStats with keys that may change between calls, equally on every rank."""

    def may_change(self, key: str) -> bool:  # noqa: ARG002  a subclass reads it
        """Return True if calls may lack a key."""
        return True

    @override
    def join(self, stats: Mapping[str, Stat]) -> None:
        """Merge the given populations; missing keys get an empty population."""
        columns = self.columns
        absent = [key for key in columns.keys if key not in stats and self.may_change(key)]
        new = [key for key in stats if key not in columns.keys and self.may_change(key)]
        empty = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=torch.float64, device=self.device)
        if new and columns.keys:
            self.moments = torch.cat([self.moments.reshape(-1, 4), empty.expand(len(new), 4)])
            columns.reductions = (*columns.reductions, *(stats[key].reduction for key in new))
            columns.keys = (*columns.keys, *new)
        filled = dict(stats)
        if absent:
            reductions = dict(zip(columns.keys, columns.reductions, strict=True))
            filled |= {key: Stat(empty, reductions[key]) for key in absent}
        order = [*(key for key in columns.keys if key in filled), *(key for key in filled if key not in columns.keys)]
        super().join({key: filled[key] for key in order})


class MicrobatchStats(GrowingStats):
    """GrowingStats of which only ``kl/rollout`` may change, because some rollouts have no log-probabilities."""

    @override
    def may_change(self, key: str) -> bool:
        return key == "kl/rollout"


class MetricLog:
    """All metrics of a run, grouped by update frequency: rollout, optimizer step, microbatch."""

    def __init__(self, device: torch.device | str = "cpu", collectives: Collectives = ALONE) -> None:
        kinds = {"rollout": RunningStats, "step": RunningStats, "microbatch": MicrobatchStats, "counter": RunningStats}
        kinds["noted"] = GrowingStats  # logged by rewards and servers at any time
        self.groups = {name: kind(collectives).to(device) for name, kind in kinds.items()}
        self._device, self._collectives = device, collectives

    def add(self, group: str, stats: Mapping[str, Stat]) -> None:
        """Merge statistics into one group; its keys are the same at every call, except for ``"noted"``."""
        if stats:
            self.groups[group].join(stats)

    def values(self) -> dict[str, float]:
        """Return every metric with a value, over all ranks. A collective."""
        return {name: value for stats in self.groups.values() if stats.keys for name, value in stats.figures().items()}

    def values_of(self, stats: Mapping[str, Stat]) -> dict[str, float]:
        """Return the values of statistics over all ranks, without adding them. A collective."""
        if self._collectives.ranks == 1:  # faster without a torchmetric
            columns = Columns(tuple(stats), tuple(stat.reduction for stat in stats.values()))
            return _figures(columns, stack_moments(tuple(stats.values()), self._device))
        running = RunningStats(self._collectives).to(self._device)
        running.join(stats)
        return running.figures()

    @property
    def names(self) -> set[str]:
        """Names of all metrics so far, those without a value included."""
        return {name for stats in self.groups.values() for name in stats.keys}

    @property
    def pending(self) -> bool:
        """True if anything was added since the last row."""
        return any(stats.keys and not stats.columns.published for stats in self.groups.values())

    def row(self) -> dict[str, float]:
        """Return the values; every group is reset at its next update."""
        values = self.values()
        for stats in self.groups.values():
            stats.columns.published = True
        return values

    def state(self) -> dict[str, Any]:
        """Return a checkpointable state of plain types."""
        return {name: stats.state() for name, stats in self.groups.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state`."""
        for name, group in state.items():
            self.groups[name].load(group)


WAITING = ("wait", "generate")  # phases in which a trainer is idle
OF_THE_CLOCK = ("time/", "tokens_per_second", "trainer/", "in_flight/")


def is_of_the_clock(metric: str) -> bool:
    """Return True if a metric depends on speed, so that it differs between runs.

    Example:
        >>> is_of_the_clock("time/update"), is_of_the_clock("kl/ref")
        (True, False)
    """
    return metric.startswith(OF_THE_CLOCK)


class PhaseTimes:
    """Seconds per phase since the last :meth:`take`.

    Args:
        device: Device to synchronize at the end of a phase.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._show: Callable[[str], None] | None = None
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._asked: float | None = None
        self._waited = 0.0

    def start(self, show: Callable[[str], None]) -> None:
        """Start the time of an optimizer step and its rollout; ``show`` gets the name of each phase that begins."""
        self._started, self._seconds, self._show = time.perf_counter(), {}, show

    def stop(self) -> None:
        """End the time of an optimizer step, before a validation."""
        self._show = None

    def seconds(self) -> float:
        """Return the seconds since the step started."""
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the name of a phase and measure the time inside of the context."""
        if self._show is not None:
            self._show(name)
        start = time.perf_counter()
        with Span(name):
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._waited += seconds if name in WAITING else 0.0

    def idle(self) -> dict[str, Stat]:
        """Return ``trainer/idle``, the fraction of time since the last call in which the trainer waited for responses.

        It is empty at the first call: the time before the first rollout holds the start of the engine and no update.
        """
        waited, asked = self._waited, self._asked
        self._waited, self._asked = 0.0, time.perf_counter()
        return Stat.numbers({"trainer/idle": math.nan if asked is None else waited / (self._asked - asked)})

    def take(self) -> dict[str, Stat]:
        """Return ``time/<phase>`` in seconds for every phase since the last call."""
        stats = Stat.numbers({f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self._seconds = {}
        return stats


def ends_row(log_every_n_steps: int, steps_per_rollout: int, index: int, axis: int) -> bool:
    """Return True if a row of metrics is logged after an optimizer step.

    With Lightning's default ``log_every_n_steps=50`` there is one row per rollout.

    Args:
        log_every_n_steps: Option of the Trainer; 0 for no rows.
        steps_per_rollout: Number of optimizer steps per rollout.
        index: Index of the step in the run, in which rollouts begin at multiples of ``steps_per_rollout``.
        axis: Step of the loggers.
    """
    if log_every_n_steps == LIGHTNINGS_DEFAULT:
        return (index + 1) % min(log_every_n_steps, steps_per_rollout) == 0
    return bool(log_every_n_steps) and (axis + 1) % log_every_n_steps == 0


def log_row(trainer: Trainer, metrics: MetricLog, axis: int, *, logs: bool) -> dict[str, float]:
    """Pass all metrics to Lightning's callbacks and bar after a step; if it ends a row, log it to every logger.

    Returns:
        The metrics that have a value now; Lightning's callbacks find older values of the others.
    """
    row = metrics.row() if logs else metrics.values()
    publish(trainer, row)
    if logs:
        _write(trainer, row, axis)
    return row


def log_rest(trainer: Trainer, metrics: MetricLog, axis: int) -> None:
    """Log metrics added since the last row of a fit that ends at a step."""
    if metrics.pending:
        _write(trainer, metrics.row(), axis)


def _write(trainer: Trainer, row: dict[str, float], axis: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(row, step=axis)
