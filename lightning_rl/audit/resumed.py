"""State of a run after it has loaded a checkpoint, compared with what the checkpoint holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rl.audit.live import LiveRun, name_of_callback, overrides
from lightning_rl.audit.user_hooks import ENTRIES, local
from lightning_rl.corrections import RLCallback
from lightning_rl.data import PromptDataModule
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.trainer import callbacks_of, is_own

WEIGHTS, OPTIMIZER, SCHEDULE, DATA, CORRECTION = "weights", "optimizer", "schedule", "data", "correction "
ROLLOUT = "rollout"
HOOKS = ("on_load_checkpoint", "setup", "on_fit_start", "on_train_start", "on_train_epoch_start")
NORM = 1e-3  # relative difference of two sums of a large tensor on two devices
Fingerprint = Mapping[str, Mapping[str, Any]]
"""Numbers of each part by path."""


def of_checkpoint(checkpoint: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a checkpoint, before any hook edits it."""
    averaged = "current_model_state" in checkpoint  # Lightning's WeightAveraging stores the mean beside the weights
    cursors = [own["cursor"] for own in checkpoint.values() if isinstance(own, dict) and "cursor" in own]
    ranks = checkpoint.get("lightning_rl", {}).get("ranks", [])
    current = ranks[0]["current"] if len(ranks) == 1 else None
    return {
        ROLLOUT: {} if current is None else _names(current["rollout"]),
        WEIGHTS: {} if averaged else dict(_leaves(checkpoint.get("state_dict", {}))),
        OPTIMIZER: dict(_leaves(checkpoint.get("optimizer_states", []))),
        SCHEDULE: dict(_leaves(checkpoint.get("lr_schedulers", []))),
        DATA: {"cursor": cursors[0]} if cursors else {},
        **{CORRECTION + str(key): dict(_leaves(own)) for key, own in checkpoint.get("callbacks", {}).items()},
    }


def _of_run(live: LiveRun) -> Fingerprint:
    trainer = live.trainer
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    corrections = [one for one in callbacks_of(trainer) if isinstance(one, RLCallback)]
    current = live.current
    return {
        ROLLOUT: {} if current is None else _names(current.rollout.state()),
        WEIGHTS: dict(_leaves(trainer.strategy.lightning_module_state_dict())),
        OPTIMIZER: dict(_leaves([optimizer.state_dict() for optimizer in trainer.optimizers])),
        SCHEDULE: dict(_leaves(schedules)),
        DATA: {"cursor": live.data.position.cursor},
        **{CORRECTION + one.state_key: dict(_leaves(one.state_dict())) for one in corrections},
    }


def compare_with_checkpoint(saved: Fingerprint, live: LiveRun) -> Iterator[Finding]:
    """Yield a finding for each part that differs from the checkpoint before the first optimizer step."""
    if live.parallel.sharded or live.changes_configuration:
        return
    loaded = _of_run(live)
    for part, numbers in saved.items():
        ours = loaded.get(part)
        changed = [] if ours is None else [path for path, value in numbers.items() if not _same(value, ours.get(path))]
        if changed:
            yield Finding(
                check="resumed_state",
                culprit=_culprit_of(part, live),
                expected=f"the {part} of the checkpoint after loading it",
                observed=f"another or none at {changed[0]} and {len(changed) - 1} other places",
                cure="load everything that was saved, and change nothing before the first step; or declare it: "
                "SignalAudit(deliberate=...)",
            )


def forgotten_states(live: LiveRun) -> Iterator[Finding]:
    """Yield a finding for each subclass of a correction whose state lacks entries of its parent."""
    for callback in callbacks_of(live.trainer):
        kinds = [kind for kind in type(callback).__mro__ if is_own_class(kind) and "state_dict" in vars(kind)]
        if not isinstance(callback, RLCallback) or is_own(callback) or not kinds:
            continue
        lost = sorted(kinds[0].state_dict(callback).keys() - callback.state_dict().keys())
        if lost:
            yield Finding(
                check="resumed_state",
                culprit=f"callback {callback.name}.state_dict",
                expected=f"{', '.join(lost)} in the state, as in that of {kinds[0].__name__}",
                observed="none, so a resumed run starts without them",
                cure="extend super().state_dict(), and load it in load_state_dict",
            )


def is_own_class(kind: type) -> bool:
    """Return True for a class of this library."""
    return kind.__module__.partition(".")[0] == "lightning_rl"


def _culprit_of(part: str, live: LiveRun) -> str:
    """Return the user's code that loads a part, or that could have changed it."""
    data, foreign = live.data, [one for one in callbacks_of(live.trainer) if not is_own(one)]
    if part == DATA and overrides(data, "load_state_dict", PromptDataModule):
        return f"data module {type(data).__name__}.load_state_dict"
    for callback in foreign:
        loads = overrides(callback, "load_state_dict", Callback)
        if isinstance(callback, RLCallback) and part == CORRECTION + callback.state_key and loads:
            return f"callback {name_of_callback(callback)}.load_state_dict"
    hooks = list(live.hooks(foreign, HOOKS, HOOKS).values())
    if part == WEIGHTS and (loader := live.overridden("load_state_dict")):
        hooks.insert(0, loader)
    return ", or ".join(hooks[:3]) or f"the loading of the checkpoint, its {part}"


def _names(rollout: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of the fields of a stored rollout that have a value."""
    return {path: True for path, _ in _leaves(rollout)}


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and the tensors of nested containers by path; a tensor as its norm and a few entries."""
    if isinstance(tree, Tensor):
        flat = local(tree.detach()).flatten()
        few = flat[:: max(len(flat) // ENTRIES, 1)][:ENTRIES].double().cpu()
        yield path, (float(torch.linalg.vector_norm(flat.double())), few.tolist())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{place}" if path else str(place))
    elif isinstance(tree, int | float):
        yield path, tree


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[1] == other[1] and abs(one[0] - other[0]) <= NORM * abs(one[0])
    return bool(one == other)
