"""Options of an optimizer as it is configured, and their use in a run that is resumed with other options."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.serialization import ABSENT, Plain, changes, describe, path_of

SCHEDULED = ("lr", "betas", "momentum")  # options of a group that the schedules of PyTorch write
RATED = (*range(32), *range(32, 1025, 32))  # steps at which two schedules are compared
STATEFUL = ("amsgrad", "centered", "momentum")  # options with which an optimizer holds a further state


@dataclass(frozen=True, slots=True)
class ConfiguredOptimizer:
    """An optimizer as it is configured, before a step or a checkpoint changes its parameter groups.

    Attributes:
        description: Class, names of the parameters of each group, options of each group without those of a schedule,
            and :func:`rates` of the schedule, such as ``{"kind": "torch.optim.sgd.SGD", "parameters": [["bias"]],
            "groups": {"0": {"lr": 0.1, ...}}, "rates": {"lr": [[1.0], [0.9], ...]}}``.
        groups: Options of each group at the first step of the schedule.
    """

    description: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChange:
    """Change of the optimizer or its schedule on resume.

    Args:
        before: Description of the optimizer in the checkpoint.
        now: Optimizer of the resumed run.
        discards: True if the saved states do not fit the optimizer.
        reschedules: True if learning rates follow the configured schedule, at the step of the checkpoint, instead of
            the saved one.
    """

    before: Mapping[str, Any]
    now: ConfiguredOptimizer
    discards: bool
    reschedules: bool

    @staticmethod
    def of(
        before: Mapping[str, Any], now: ConfiguredOptimizer, paths: Sequence[str], *, schedule: bool
    ) -> "OptimizerChange | None":
        """Return the change by the paths of the options that differ; None without one.

        Args:
            before: Description of the optimizer in the checkpoint.
            now: Optimizer of the resumed run.
            paths: Paths of :func:`option_changes`.
            schedule: True if the schedule differs.
        """
        if not (paths or schedule):
            return None
        discards = _other_states(before, now.description)
        reschedules = discards or schedule or any(path.rpartition(".")[2] in SCHEDULED for path in paths)
        return OptimizerChange(before=before, now=now, discards=discards, reschedules=reschedules)

    @contextmanager
    def loading(self, trainer: Trainer) -> Iterator[None]:
        """Let a strategy that loads optimizer states together with the weights load what fits.

        ``torch.distributed.checkpoint`` raises an error for an option or a state that the checkpoint lacks.
        """
        strategy, fits, optimizers = trainer.strategy, trainer.state.fn, trainer.strategy.optimizers
        if self.discards:  # FSDP2 loads the listed optimizers; FSDP1 and DeepSpeed load optimizers in a fit
            strategy.optimizers, trainer.state.fn = [], TrainerFn.VALIDATING
        else:
            for group, old in self._pairs(optimizers[0].param_groups):
                for name in group.keys() - old.keys() - {"params"}:
                    del group[name]  # until renew()
        try:
            yield
        finally:
            strategy.optimizers, trainer.state.fn = optimizers, fits

    def renew(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the options that changed into parameter groups from the checkpoint."""
        for (group, old), options in zip(self._pairs(groups), self.now.groups, strict=True):
            for name, value in options.items():
                if self.reschedules if name in SCHEDULED else old.get(name, ABSENT) != describe(value):
                    group[name] = value

    def _pairs(self, groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Return each parameter group with its description in the checkpoint."""
        return list(zip(groups, self.before["groups"].values(), strict=True))


def describe_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Plain]:
    """Return class, parameters and options of an optimizer as plain values.

    Args:
        optimizer: Optimizer before a schedule changes its options.
        names: Name of each parameter of the model by its id.
    """
    groups = optimizer.param_groups
    return {
        "kind": path_of(type(optimizer)),
        "parameters": [[names.get(id(parameter), "unnamed") for parameter in group["params"]] for group in groups],
        "groups": {
            str(place): {key: describe(group[key]) for key in _options(group)} for place, group in enumerate(groups)
        },
    }


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the options of each parameter group, without the parameters."""
    return [{key: copy.deepcopy(group[key]) for key in _options(group)} for group in optimizer.param_groups]


def rates(builder: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> dict[str, list[list[float]]]:
    """Return what a schedule writes into an optimizer at the steps of :data:`RATED`, until it ends.

    The schedule is built and stepped with an initial learning rate of 1, and leaves the optimizer as it was.

    Returns:
        Values of all groups at each step: of ``"lr"``, and of betas and momentum if they vary.
    """
    written: dict[str, list[list[float]]] = {name: [] for name in SCHEDULED}
    with _stepping(builder, optimizer, RATED[-1] + 1) as steps:
        for step in steps:
            for name, values in written.items() if step in RATED else ():
                values.append(_numbers([group[name] for group in optimizer.param_groups if name in group]))
    return {name: values for name, values in written.items() if name == "lr" or values.count(values[0]) < len(values)}


def schedule_end(builder: Callable[[Optimizer], LRScheduler], optimizer: Optimizer, steps: int) -> int | None:
    """Return the length of a schedule: the steps until its rates are 0 again, or it raises; None if it lasts."""
    step, trained = 0, False
    with _stepping(builder, optimizer, steps + 1) as stepping:
        for step in stepping:
            rate = max(float(group["lr"]) for group in optimizer.param_groups)
            if trained and rate < 1e-9 and step < steps:  # of 1; a cosine is not 0 exactly
                return step
            trained = trained or rate > 0
    return None if step == steps else step


@contextmanager
def _stepping(builder: Callable[[Optimizer], LRScheduler], optimizer: Optimizer, steps: int) -> Iterator[Iterator[int]]:
    """Step a schedule with an initial learning rate of 1 until its end, and leave the optimizer as it was."""
    groups, before = optimizer.param_groups, dict(vars(optimizer))
    options = [dict(group) for group in groups]
    for group in groups:
        group["lr"] = 1.0

    def each() -> Iterator[int]:
        scheduler = builder(optimizer)
        for step in range(steps):
            yield step
            try:
                scheduler.step()
            except Exception:  # noqa: BLE001  its end, or an error that training will raise, too
                return

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield each()
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        for group, kept in zip(groups, options, strict=True):
            group.clear()
            group.update(kept)


def _numbers(values: Any) -> list[float]:
    """Return the numbers in nested sequences."""
    return [one for value in values for one in (_numbers(value) if isinstance(value, tuple | list) else [float(value)])]


def rate_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return path and both values at the first step at which two descriptions have other rates."""
    changed = []
    old, new = (description.get("rates") or {} for description in (before, now))
    for name in old.keys() & new.keys():
        for step, pair in zip(RATED, zip_longest(old[name], new[name], fillvalue=()), strict=False):
            if not _are_close(*pair):
                changed.append((f"lr_scheduler.{name} at step {step}", *(list(values) or ABSENT for values in pair)))
                break
    return changed if len(before["groups"]) == len(now["groups"]) else []


def _are_close(old: Sequence[float], new: Sequence[float]) -> bool:
    pairs = zip(old, new, strict=False)  # other machines round otherwise
    return len(old) == len(new) and all(math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-12) for pair in pairs)


def option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return path and both values of the options that differ; those that only one version of PyTorch has do not."""
    options = changes({**before, "rates": None}, {**now, "rates": None}, "optimizer")
    return [change for change in options if ABSENT not in change[1:]]


def advance(scheduler: LRScheduler, steps: int, rates: Mapping[str, Any] | None) -> None:
    """Take steps of a new schedule, as if it had been there from the start of the run.

    Args:
        scheduler: New schedule.
        steps: Number of steps.
        rates: Its :func:`rates`.

    Raises:
        ValueError: If the schedule ends before.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        try:
            for _ in range(steps):
                scheduler.step()
        except ValueError as ended:
            raise ValueError(f"expected an lr_scheduler that reaches optimizer step {steps}, got {ended}") from ended
    later = [rate for step, rate in zip(RATED, (rates or {}).get("lr", ()), strict=False) if step >= steps]
    if not any(map(any, [scheduler.get_last_lr(), *later])):
        raise ValueError(
            f"expected an lr_scheduler that reaches optimizer step {steps}, got one whose learning rate is 0 from "
            "there on: let it end later, or resume without it"
        )


def _other_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if optimizers with these descriptions have different states."""
    if (before["kind"], before["parameters"]) != (now["kind"], now["parameters"]):
        return True
    pairs = zip(before["groups"].values(), now["groups"].values(), strict=True)
    return any(bool(old.get(name)) != bool(new.get(name)) for old, new in pairs for name in STATEFUL)


def _options(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key != "params"]
