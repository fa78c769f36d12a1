"""Evidence of findings in a file, and checks that run again from it."""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch.serialization import safe_globals

from lightning_rl.audit.checks import CHECKS
from lightning_rl.audit.evidence import Evidence, recompute_step, repeatable
from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import rebuild_rollout
from lightning_rl.testing.properties.check import run_checks
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.terminal import dump_visible

SAVED = [spec.name for spec in fields(Evidence) if spec.name not in ("algorithm", "text")]


def _classes_in(kind: Any) -> Iterator[type]:
    """Yield the dataclasses, named tuples and enumerations that occur in a type."""
    for part in get_args(kind):
        yield from _classes_in(part)
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields") or issubclass(kind, Enum)):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _classes_in(hint)


KINDS = get_type_hints(Evidence)
CLASSES: list[Any] = [*dict.fromkeys(one for name in SAVED for one in _classes_in(KINDS[name])), rebuild_rollout]
"""Classes that a file may contain."""


def save(evidence: Evidence, findings: Sequence[Finding], path: Path) -> None:
    """Write evidence and findings to a file for :func:`load`, and the findings to a file for the report beside it.

    It contains the rollout, the checked rows with the models' outputs, the results of engine and rewards, the optimizer
    step, the state of the corrections and plain values of the run, but neither weights nor code.
    """
    empty: dict[str, Any] = {"columns": {}, "extras": {}, "metrics": {}}
    calls = [RewardCall(*call[:4], **empty) for call in evidence.calls]
    step = None if evidence.step is None else replace(evidence.step, recomputed=None)
    evidence = replace(evidence, calls=calls, step=step)
    state: dict[str, Any] = {name: getattr(evidence, name) for name in SAVED}
    state["states"] = _states_of(evidence.algorithm.corrections.callbacks)
    state["findings"] = [asdict(finding) for finding in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    lines = [dump_visible({"rollout": evidence.number, **finding}) + "\n" for finding in state["findings"]]
    name = path.stem.replace("rollout", "findings", 1) + ".jsonl"
    write_atomically(path.with_name(name), lambda part: part.write_text("".join(lines), encoding="utf-8"))


def load(path: Path | str) -> dict[str, Any]:
    """Return the contents of a file of :func:`save`; nothing else is unpickled."""
    with safe_globals(CLASSES):
        return torch.load(path, "cpu", weights_only=True, mmap=True)


def recheck(
    path: Path | str,
    module: RLLightningModule,
    callbacks: Sequence[RLCallback] = (),
    checks: Sequence[str] | None = None,
) -> list[Finding]:
    """Run the checks of a saved file again, without model, engine or Trainer.

    Estimator, loss, reduction and corrections are those of ``module`` and ``callbacks``, so a finding disappears once
    they are fixed. Corrections get the state that they had in the run. Reward functions are not called again.

    Args:
        path: File that a finding names.
        module: Module as in the run; it need not have been fitted.
        callbacks: Corrections of the run.
        checks: Names of the checks to run; by default those with a finding.

    Raises:
        ValueError: If a check is unknown, with a list of the known ones, or if the file is not evidence of an audit.
    """
    try:
        state = load(path)
        algorithm = repeatable(module.algorithm, callbacks)
        for callback in algorithm.corrections.callbacks:
            if callback.name in state["states"]:
                callback.load_state_dict(state["states"][callback.name])
        names = list(dict.fromkeys(finding["check"] for finding in state["findings"]) if checks is None else checks)
        evidence = Evidence(algorithm=algorithm, **{name: state[name] for name in SAVED})
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as wrong:
        raise ValueError(
            f"expected evidence as SignalAudit saves it, got {path}: {type(wrong).__name__}: {wrong}"
        ) from wrong
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
    if evidence.step is not None:
        recompute_step(evidence, evidence.step)
    return run_checks([CHECKS[name] for name in names], evidence)


def _states_of(callbacks: Sequence[RLCallback]) -> dict[str, Any]:
    """Return the state of each correction by name, if it consists of plain values."""
    states = dict[str, Any]()
    for callback in callbacks:
        file, state = io.BytesIO(), callback.state_dict()
        try:
            torch.save(state, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError):
            continue
        states |= {callback.name: state} if state else {}
    return states
