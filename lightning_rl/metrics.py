"""Metrics: statistics that merge over microbatches, steps and ranks, the time of each phase, and what logs them."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_rl.corrections import Stat
from lightning_rl.corrections.stat import StatReduction, merge_moments, reduce_moments, stack_moments
from lightning_rl.distributed import ALONE, Collectives

ON_THE_BAR = "reward/task"  # more would not fit into a line beside the bar; a `RolloutSummary` says the rest
LIGHTNINGS_DEFAULT = 50  # log_every_n_steps of a Trainer that was given none


@dataclass(slots=True)
class Columns:
    """What the rows of the moments are, beside the module that holds those: its every attribute is written slowly.

    Attributes:
        keys: of each row.
        reductions: of each row.
        published: whether the next update begins anew.
        restored: whether it comes out of a checkpoint.
    """

    keys: tuple[str, ...] = ()
    reductions: tuple[StatReduction, ...] = ()
    published: bool = False
    restored: bool = False


class RunningStats(Metric):
    """Merges statistics with a fixed set of keys. All ranks together hold one ``[K, 4]`` state, one collective to sync.

    What has been computed once is dropped at the next update, so a value stays readable until there is a new one.
    """

    full_state_update = False
    moments: Tensor

    def __init__(self, collectives: Collectives = ALONE) -> None:
        super().__init__(process_group=collectives.rows, distributed_available_fn=lambda: collectives.ranks > 1)
        self.columns, self._alone = Columns(), collectives.ranks == 1
        self.add_state("moments", torch.zeros(0, 4, dtype=torch.float64), dist_reduce_fx=merge_moments)

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the statistics, in their order."""
        return self.columns.keys

    @override
    def update(self, stats: Mapping[str, Stat]) -> None:
        """Joins the given populations to those so far."""
        self.join(stats)

    def join(self, stats: Mapping[str, Stat]) -> None:
        """The same without what torchmetrics wraps around :meth:`update`."""
        columns, keys = self.columns, tuple(stats)
        new = stack_moments(tuple(stats.values()), self.moments.device)
        if columns.restored and keys != columns.keys:  # resumed with other corrections: what was not logged is dropped
            columns.keys = ()
        if columns.keys and keys != columns.keys:
            difference = sorted(set(keys) ^ set(columns.keys))
            raise ValueError(f"expected the same metrics at every call, but {', '.join(difference)} came or went")
        fresh = columns.published or not columns.keys
        columns.keys, columns.reductions = keys, tuple(stat.reduction for stat in stats.values())
        columns.published = columns.restored = False
        self.moments = new if fresh else merge_moments(torch.stack([self.moments, new]))

    @override
    def compute(self) -> Tensor:
        """The moments of each key over all ranks, shape [K, 4]."""
        return self.moments

    def figures(self) -> dict[str, float]:
        """The figure of each key that has a population, over all ranks. A collective."""
        if self._alone:
            moments = self.moments
        else:
            self._computed, self._update_count = None, 1  # torchmetrics caches until the next update
            moments = self.compute()
        return _figures(self.columns, moments)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on, in plain types."""
        columns = self.columns
        named = {"keys": list(columns.keys), "reductions": list(columns.reductions), "published": columns.published}
        return {**named, "moments": self.moments.cpu().clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.columns = Columns(tuple(state["keys"]), tuple(state["reductions"]), state["published"], restored=True)
        self.moments = state["moments"].to(self.device)


def _figures(columns: Columns, moments: Tensor) -> dict[str, float]:
    """The figure of each key that has a population."""
    rows = moments.reshape(-1, 4).tolist()  # torchmetrics squeezes a single row
    values = {
        key: reduce_moments(row, reduction)
        for key, reduction, row in zip(columns.keys, columns.reductions, rows, strict=True)
    }
    return {key: value for key, value in values.items() if not math.isnan(value)}


class GrowingStats(RunningStats):
    """The same for keys that come and go. What is new is empty before, and every rank has to know it at once."""

    @override
    def join(self, stats: Mapping[str, Stat]) -> None:
        """Joins the given populations to those so far."""
        columns = self.columns
        absent = [key for key in columns.keys if key not in stats]
        new = [key for key in stats if key not in columns.keys]
        nobody = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=torch.float64, device=self.device)
        if new and columns.keys:
            self.moments = torch.cat([self.moments.reshape(-1, 4), nobody.expand(len(new), 4)])
            columns.reductions = (*columns.reductions, *(stats[key].reduction for key in new))
            columns.keys = (*columns.keys, *new)
        order = dict(zip(columns.keys, columns.reductions, strict=True)) or {key: stats[key].reduction for key in new}
        super().join({key: Stat(nobody, order[key]) if key in absent else stats[key] for key in order})


class MetricLog:
    """All metrics of a run, by how often they are updated: per rollout, per optimizer step, per microbatch."""

    def __init__(self, device: torch.device | str = "cpu", collectives: Collectives = ALONE) -> None:
        self.groups = {
            name: RunningStats(collectives).to(device) for name in ("rollout", "step", "microbatch", "counter")
        }
        self.groups["noted"] = GrowingStats(collectives).to(device)  # what rewards and servers log, when they like
        self.shown: tuple[int, dict[str, float]] = (-1, {})  # epoch, and what Lightning was given in it for the bar

    def add(self, group: str, stats: Mapping[str, Stat]) -> None:
        """Joins statistics to one group; its keys are the same at every call."""
        if stats:
            self.groups[group].join(stats)

    def values(self) -> dict[str, float]:
        """Every metric with a value, over all ranks. A collective."""
        return {name: value for stats in self.groups.values() if stats.keys for name, value in stats.figures().items()}

    @property
    def pending(self) -> bool:
        """Whether anything was added since the last row."""
        return any(stats.keys and not stats.columns.published for stats in self.groups.values())

    def row(self) -> dict[str, float]:
        """The values, after which every group begins anew with its next update."""
        values = self.values()
        for stats in self.groups.values():
            stats.columns.published = True
        return values

    def state(self) -> dict[str, Any]:
        """Everything needed to go on, in plain types."""
        return {name: stats.state() for name, stats in self.groups.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, own in state.items():
            self.groups[name].load(own)


WAITING = ("wait", "generate")  # phases in which a trainer has nothing to do but to wait for answers
OF_THE_CLOCK = ("time/", "tokens_per_second", "trainer/", "in_flight/", "server/")


def is_of_the_clock(metric: str) -> bool:
    """Whether a metric depends on how fast something was, so that no two runs agree in it.

    Example:
        >>> is_of_the_clock("time/update"), is_of_the_clock("kl/ref")
        (True, False)
    """
    return metric.startswith(OF_THE_CLOCK)


class PhaseTimes:
    """Seconds by phase, collected until they are taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = self._asked = time.perf_counter()
        self._waited = 0.0

    def start(self) -> None:
        """Begins the time of an optimizer step, its rollout included; a validation before it does not count."""
        self._started, self._seconds = time.perf_counter(), {}

    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Measures what happens inside."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._waited += seconds if name in WAITING else 0.0

    def idle(self) -> Stat:
        """The share of all time since the last call in which the trainer waited for answers."""
        waited, asked = self._waited, self._asked
        self._waited, self._asked = 0.0, time.perf_counter()
        return Stat.single(waited / (self._asked - asked))

    def take(self) -> dict[str, Stat]:
        """``time/<phase>`` of every phase since the last call, in seconds."""
        stats = Stat.numbers({f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self._seconds = {}
        return stats


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks; Lightning sets the attribute without declaring it."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def monitored_keys(trainer: Trainer) -> set[str]:
    """What checkpoints and early stopping read."""
    watching = [c for c in callbacks_of(trainer) if isinstance(c, ModelCheckpoint | EarlyStopping)]
    monitors = {callback.monitor for callback in watching if callback.monitor}
    return {key for key in monitors if not key.startswith("val/")}


def global_values(
    stats: Mapping[str, Stat], device: torch.device | str = "cpu", collectives: Collectives = ALONE
) -> dict[str, float]:
    """The figures of some statistics over all ranks, gathered on ``device``. A collective."""
    if collectives.ranks == 1:  # a torchmetric costs more than all of its figures
        columns = Columns(tuple(stats), tuple(stat.reduction for stat in stats.values()))
        return _figures(columns, stack_moments(tuple(stats.values()), device))
    running = RunningStats(collectives).to(device)
    running.join(stats)
    return running.figures()


def rows_every(log_every_n_steps: int, steps_per_rollout: int) -> int:
    """Tickets between two rows of metrics; 0 for no rows.

    A Trainer that was not told otherwise has ``log_every_n_steps=50``, which would leave one row of 50 rollouts; it
    gets a row for each rollout.
    """
    default = log_every_n_steps == LIGHTNINGS_DEFAULT
    return min(log_every_n_steps, steps_per_rollout) if default else log_every_n_steps


def log_row(module: LightningModule, metrics: MetricLog, ticket: int, every: int) -> None:
    """Logs one whole row every ``every`` tickets, straight to every logger; Lightning gets what something reads back.

    ``self.log`` would cost half a millisecond for each key and call.
    """
    known = set(metrics.groups["rollout"].keys)  # Lightning has had these when the rollout was finished
    if monitored_keys(module.trainer) - known:
        values = metrics.values()
        log_for_monitors(module, {name: value for name, value in values.items() if name not in known})
    if every and (ticket + 1) % every == 0:
        row = metrics.row()
        _write(module.trainer, row, ticket)
        shown = module.current_epoch, {ON_THE_BAR: row[ON_THE_BAR]} if ON_THE_BAR in row else {}
        if shown != metrics.shown:  # it keeps the last value of each for an epoch
            module.log_dict(shown[1], prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
            metrics.shown = shown


def log_rest(trainer: Trainer, metrics: MetricLog, ticket: int) -> None:
    """Logs what came after the last row of a fit that ends at ``ticket``."""
    if metrics.pending:
        _write(trainer, metrics.row(), ticket)


def log_for_monitors(module: LightningModule, values: Mapping[str, float]) -> None:
    """Gives Lightning the keys that checkpoints and early stopping read back."""
    chosen = {key: values[key] for key in sorted(monitored_keys(module.trainer) & set(values))}
    if chosen:
        module.log_dict(chosen, logger=False, on_step=True, on_epoch=False, batch_size=1)


def _write(trainer: Trainer, row: dict[str, float], ticket: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(row, step=ticket)
