"""Evidence of findings in a file of plain values and tensors, and checks that run again from it."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lightning_rl.audit.checks import CHECKS, run_checks
from lightning_rl.audit.evidence import Evidence, recompute_step, repeatable
from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Rollout
from lightning_rl.utils.finding import Finding

SAVED = [spec.name for spec in fields(Evidence) if spec.name not in ("algorithm", "text")]


def save(evidence: Evidence, findings: Sequence[Finding], path: Path) -> None:
    """Write evidence and findings to a file that loads under ``weights_only=True``.

    It contains the rollout, the checked rows with the models' outputs, the results of engine and rewards, the optimizer
    step, the state of the corrections and plain values of the run, but neither weights nor code.
    """
    calls = [RewardCall(call.name, call.completion_ids, call.values, call.seconds) for call in evidence.calls]
    step = None if evidence.step is None else replace(evidence.step, recomputed=None)
    evidence = replace(evidence, calls=calls, step=step)
    state = {name: _plain(getattr(evidence, name)) for name in SAVED}
    state["states"] = _states_of(evidence.algorithm.corrections.callbacks)
    state["findings"] = [asdict(finding) for finding in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


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
        state = torch.load(path, "cpu", weights_only=True)
        algorithm = repeatable(module.algorithm, callbacks)
        for callback in algorithm.corrections.callbacks:
            if callback.name in state["states"]:
                callback.load_state_dict(state["states"][callback.name])
        names = list(dict.fromkeys(finding["check"] for finding in state["findings"]) if checks is None else checks)
        kinds = get_type_hints(Evidence)
        evidence = Evidence(algorithm=algorithm, **{name: _restore(kinds[name], state[name]) for name in SAVED})
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as wrong:
        raise ValueError(
            f"expected evidence as SignalAudit saves it, got {path}: {type(wrong).__name__}: {wrong}"
        ) from wrong
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
    if evidence.step is not None:
        evidence.step.recomputed = recompute_step(evidence, evidence.step)
    return run_checks([CHECKS[name] for name in names], evidence)


def _states_of(callbacks: Sequence[RLCallback]) -> dict[str, Any]:
    """Return the state of each correction by name, if it consists of plain values."""
    states = dict[str, Any]()
    for callback in callbacks:
        stream, state = io.BytesIO(), _plain(callback.state_dict())
        try:
            torch.save(state, stream)
            stream.seek(0)
            torch.load(stream, weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError):
            continue
        states |= {callback.name: state} if state else {}
    return states


def _plain(value: Any) -> Any:
    """Return a value with dataclasses and named tuples as dicts, and tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Rollout):
        return _plain(value.state())
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {spec.name: _plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        fields_of: Any = getattr(value, "_asdict", None)
        return type(value)(map(_plain, value)) if fields_of is None else _plain(fields_of())
    return value


def _restore(kind: Any, value: Any) -> Any:
    """Return the value of a type from its :func:`_plain` form."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _restore(arguments[0], value)
    if kind is Rollout:
        return Rollout.from_state(value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_restore(part, item) for part, item in zip(arguments, value, strict=True))
    if origin is tuple:
        return tuple(_restore(arguments[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _restore(arguments[1], item) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_restore(arguments[0], item) for item in value]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        make: Any = kind
        kinds = get_type_hints(make)
        return make(**{name: _restore(kinds[name], item) for name, item in value.items()})
    return value
