"""The verdict on one case: matched, differs on purpose, not offered or failed."""

from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path

import numpy as np
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.compare import Difference, difference
from goldens.params import Params
from goldens.registry import NotOfferedError, not_compared, replay_of
from goldens.rules import RULES, Rule

for file in Path(__file__).parent.glob("[!_]*.py"):
    import_module(f"goldens.{file.stem}")  # which registers its replays


class Status(StrEnum):
    """Result of a case."""

    MATCHED = "matched"
    RULE = "differs on purpose"
    NOT_OFFERED = "not offered"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """A status with its explanation: the rule, the reason, or the field and the error."""

    case: Case
    status: Status
    detail: str = ""


def verdict(case: Case) -> Verdict:
    """Replay a case and compare every recorded field.

    A parameter that the replay has not read makes the recorded call another one than the replayed: it is not offered.
    """
    params = Params(case.params)
    try:
        outputs = replay_of(case)(replace(case, params=params))
    except NotOfferedError as reason:
        return Verdict(case, Status.NOT_OFFERED, str(reason))
    except Exception as error:  # noqa: BLE001 - an exception fails this case alone
        return Verdict(case, Status.FAILED, f"call  {type(error).__name__}: {error}".splitlines()[0])
    if unread := params.unread():
        return Verdict(case, Status.NOT_OFFERED, ", ".join(f"{name}={value!r}" for name, value in unread.items()))
    return _compare(case, outputs)


def _compare(case: Case, outputs: Outputs) -> Verdict:
    compared: dict[str, Difference] = {}
    for name, field in case.outputs.items():
        if name in outputs:
            try:
                compared[name] = difference(outputs[name], field)
            except ValueError as error:
                return Verdict(case, Status.FAILED, f"{name}  {error}")
        elif not not_compared(name):
            return Verdict(case, Status.FAILED, f"{name}  no value for this field")
    if not compared:
        return Verdict(case, Status.FAILED, "nothing to compare")
    different = {name: one for name, one in compared.items() if one.found}
    if not different:
        return Verdict(case, Status.MATCHED)
    for rule in RULES:
        if _explained(rule, case, different):
            return Verdict(case, Status.RULE, rule.name)
    worst = max(different, key=lambda name: _sortable(different[name].largest))
    return Verdict(case, Status.FAILED, f"{worst}  off by {different[worst].largest:.3g}")


def _sortable(error: float) -> float:
    return np.inf if np.isnan(error) else error


def _explained(rule: Rule, case: Case, different: dict[str, Difference]) -> bool:
    if case.algorithm not in rule.algorithms:
        return False
    try:
        predicted = rule.predicts(case)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
        return False  # a rule about inputs or parameters that this case does not have
    return all(name in predicted and _as_predicted(found, *predicted[name]) for name, found in different.items())


def _as_predicted(found: Difference, positions: Tensor, ours: Tensor) -> bool:
    """Return True if all differences lie at the positions and our values there are the predicted ones."""
    where, wanted = (_spread(one.numpy(), found.apart.shape) for one in (positions, ours))
    if (found.apart & ~where).any():
        return False
    return np.allclose(found.ours[where], wanted[where], rtol=1e-4, atol=1e-6, equal_nan=True)


def _spread(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(values.reshape(values.shape + (1,) * (len(shape) - values.ndim)), shape)
