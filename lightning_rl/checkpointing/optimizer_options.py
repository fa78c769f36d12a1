"""Options of an optimizer as it is configured, and their use in a run that is resumed with other options."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.serialization import ABSENT, Plain, changes, describe, path_of

SCHEDULED = ("lr", "betas", "momentum")  # options of a group that the schedules of PyTorch write
STATEFUL = ("amsgrad", "centered", "momentum")  # options with which an optimizer holds a further state


@dataclass(frozen=True, slots=True)
class ConfiguredOptimizer:
    """An optimizer as it is configured, before a step or a checkpoint changes its parameter groups.

    Attributes:
        description: Class, number of parameters of each group, and options of each group without those of a schedule,
            such as ``{"kind": "torch.optim.sgd.SGD", "sizes": [26], "groups": {"0": {"lr": 0.1, ...}}}``.
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


def describe_optimizer(optimizer: Optimizer) -> dict[str, Plain]:
    """Return class, group sizes and options of an optimizer as plain values."""
    groups = optimizer.param_groups
    return {
        "kind": path_of(type(optimizer)),
        "sizes": [len(group["params"]) for group in groups],
        "groups": {
            str(place): {key: describe(group[key]) for key in _options(group)} for place, group in enumerate(groups)
        },
    }


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without the parameters."""
    return [{key: group[key] for key in _options(group)} for group in optimizer.param_groups]


def option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return path and both values of the options that differ; those that only one version of PyTorch has do not."""
    return [change for change in changes(before, now, "optimizer") if ABSENT not in change[1:]]


def advance(scheduler: LRScheduler, steps: int) -> None:
    """Take steps of a new schedule, as if it had been there from the start of the run.

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


def _other_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if optimizers with these descriptions have different states."""
    if (before["kind"], before["sizes"]) != (now["kind"], now["sizes"]):
        return True
    pairs = zip(before["groups"].values(), now["groups"].values(), strict=True)
    return any(bool(old.get(name)) != bool(new.get(name)) for old, new in pairs for name in STATEFUL)


def _options(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key != "params"]
