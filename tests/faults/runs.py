"""Short runs with a fault or without it, and what differs between two of them.

``sound_run`` is the run of a fault without what is wrong in it: no patches, and every callback, option or data module
that is defined among the faults is left out, or replaced by what the fault names as ``sound``.
"""

import math
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts, weights_of
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from faults.fault import Fault
from faults.on_ranks import beside_each_other, of_strategy, run_on_ranks
from lightning_rl import PromptDataModule, RLCallback, Rollout
from lightning_rl.metrics import is_of_the_clock

TEMPERATURE = 0.5


class Rows(Logger):
    """Keeps every row of figures that reaches a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    @override
    def name(self) -> str:
        return "rows"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Keeps none."""

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))


class Keeper(RLCallback):
    """Keeps a copy of every finished rollout."""

    name = "zz_keeper"

    def __init__(self) -> None:
        self.rollouts: list[dict[str, Tensor]] = []

    @override
    def observe(self, rollout: Rollout) -> None:
        self.rollouts.append({name: tensor.clone() for name, tensor in rollout.tensors()})


@dataclass
class Outcome:
    """What a run left behind: weights, rows of the logger, rollouts, and what it raised."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    rollouts: list[dict[str, Tensor]] = field(default_factory=list)
    raised: str = ""


def run_with(
    callbacks: Sequence[Callback],
    options: dict[str, Any],
    data: PromptDataModule,
    *,
    folder: Path,
    max_steps: int = 6,
    trainer: dict[str, Any] | None = None,
    patches: Sequence[Any] = (),
) -> Outcome:
    """Fits; whatever a run raises is kept."""
    settings = {"temperature": TEMPERATURE, "optimizer": partial(AdamW, lr=0.05), "policy": tiny_policy}
    outcome, rows, keeper = Outcome(), Rows(), Keeper()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for patched in patches:
            stack.enter_context(patched)
        module = tiny_module(**{**settings, **options})
        limits: dict[str, Any] = {"max_steps": max_steps, "default_root_dir": folder, **(trainer or {})}
        try:
            fit(module, callbacks=[*callbacks, keeper], data=data, logger=rows, **limits)
        except Exception as raised:  # noqa: BLE001  a fault may break the run as well
            outcome.raised = f"{type(raised).__name__}: {raised}"
    if module.policy is not None:
        outcome.weights = weights_of(module)
    outcome.rows, outcome.rollouts = rows.rows, keeper.rollouts
    return outcome


def faulty_run(fault: Fault) -> Outcome:
    """The run with the fault, and without the audit."""
    if fault.ranks > 1 and not beside_each_other():
        return _joined(run_on_ranks(fault, "faulty"))
    callbacks, options, data = fault.parts()
    return _run(fault, callbacks, options, data, fault.patches)


def sound_run(fault: Fault) -> Outcome:
    """The same run without what is wrong in it."""
    if fault.ranks > 1 and not beside_each_other():
        return _joined(run_on_ranks(fault, "sound"))
    callbacks, options, data = fault.parts()
    callbacks = fault.sound["callbacks"]() if "callbacks" in fault.sound else [c for c in callbacks if not wrong(c)]
    options = {key: value for key, value in options.items() if not wrong(value)}
    if "options" in fault.sound:
        options |= fault.sound["options"]()
    if "data" in fault.sound:
        data = fault.sound["data"]()
    elif wrong(data):
        data = tiny_prompts(16, 4)
    return _run(fault, callbacks, options, data, ())


def _run(fault: Fault, callbacks: Sequence[Callback], options: Any, data: Any, patches: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        limits: dict[str, Any] = {"max_steps": fault.max_steps, "trainer": of_strategy(fault)}
        return run_with(callbacks, options, data, folder=Path(folder), patches=patches, **limits)


def _joined(ranks: Sequence[dict[str, Any]]) -> Outcome:
    """What all ranks of a run left behind."""
    weights = {f"{name} of rank {rank}": w for rank, left in enumerate(ranks) for name, w in left["weights"].items()}
    rollouts = [rollout for left in ranks for rollout in left["rollouts"]]
    raised = next((left["raised"] for left in ranks if left["raised"]), "")
    return Outcome(weights, ranks[0]["rows"], rollouts, raised)


def wrong(part: Any) -> bool:
    """Whether a part is one of the faults' own."""
    part = part.func if isinstance(part, partial) else part
    return str(getattr(part, "__module__", "")).split(".")[0] == "faults"


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What two runs do not have in common: weights, figures that both log, fields of rollouts; none for equal runs."""
    found = [f"weight {name}" for name in one.weights.keys() | other.weights.keys() if _differ(name, one, other)]
    if len(one.rows) != len(other.rows):
        found.append("number of rows")
    for row, twin in zip(one.rows, other.rows, strict=False):
        shared = [name for name in row.keys() & twin.keys() if not is_of_the_clock(name)]
        found += [f"figure {name}" for name in shared if not _same(row[name], twin[name])]
    if one.rollouts and other.rollouts and any(one.rows) and any(other.rows):
        found += [f"figure {name} is missing" for name in other.rows[-1].keys() - one.rows[-1].keys()]
    for rollout, twin in zip(one.rollouts, other.rollouts, strict=False):
        shared = sorted(rollout.keys() & twin.keys())
        found += [f"rollout {name}" for name in shared if not _equal(rollout[name], twin[name])]
    return sorted(set(found))


def _differ(name: str, one: Outcome, other: Outcome) -> bool:
    return name not in one.weights or name not in other.weights or not _equal(one.weights[name], other.weights[name])


def _same(figure: float, twin: float) -> bool:
    return figure == twin or (math.isnan(figure) and math.isnan(twin))


def _equal(tensor: Tensor, twin: Tensor) -> bool:
    alike = tensor.shape == twin.shape and tensor.dtype == twin.dtype
    return alike and torch.equal(
        tensor.nan_to_num() if tensor.is_floating_point() else tensor,
        twin.nan_to_num() if twin.is_floating_point() else twin,
    )
