"""Differences between two computations, named by sample and position."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightning_rl.recording.recompute import Replayed
from lightning_rl.recording.recording import Recording
from lightning_rl.rollout import Rollout
from lightning_rl.serialization import CLASS, NAME, changes

LATE = ("old_logprobs", "ref_logprobs", "values", "trained", "rewarded", "valid_tokens", "advantages", "returns")
ORDER = (*(spec.name for spec in fields(Rollout) if spec.name not in LATE), *LATE)  # of computation
SIGNAL = ("trained", "rewarded", "valid_tokens", "advantages", "returns")
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between two values of one quantity.

    Attributes:
        what: Name of the quantity.
        number: Number of differing entries; 0 if a value is missing, has another shape or is not a tensor.
        max: Largest absolute difference.
        scale: Largest finite magnitude of our values.
        place: First difference: sample or step, and position.
        values: Both values at that place.
    """

    what: str
    number: int = 0
    max: float = 0.0
    scale: float = 0.0
    place: str = ""
    values: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        """Return one line for a console."""
        sides = f"{self.values[0]} against {self.values[1]}"
        return f"{self.number} differ by up to {self.max:.3g}, first {self.place}: {sides}" if self.number else sides

    @property
    def rounding(self) -> bool:
        """True if another device or build of torch explains the difference."""
        return bool(self.number) and self.max <= ROUNDING * self.scale


def difference(what: str, ours: Tensor | None, theirs: Tensor | None, rows: list[str]) -> Difference | None:
    """Compare bit for bit, with NaN equal to NaN; return None if the tensors are equal.

    Args:
        what: Name of the quantity.
        ours: Tensor [B, ...].
        theirs: Tensor of any shape.
        rows: Names of the B entries of the first axis.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return None if ours is theirs else Difference(what=what, values=(_shape(ours), _shape(theirs)))
    unequal = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    if not unequal.any():
        return None
    first = tuple(unequal.nonzero()[0].tolist())
    sides = ours.double(), theirs.double()
    gaps = torch.where(unequal, (sides[0] - sides[1]).abs(), 0.0).nan_to_num(nan=torch.inf)
    finite = sides[0].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Difference(
        what=what,
        number=int(unequal.sum()),
        max=float(gaps.max()),
        scale=float(finite.abs().max()),
        place=rows[first[0]] + (f", position {first[1]}" if len(first) > 1 else ""),
        values=(f"{ours[first].item()!r}", f"{theirs[first].item()!r}"),
    )


def replay_differences(recording: Recording, replayed: Replayed) -> Iterator[tuple[str, Difference | None]]:
    """Yield each recomputed quantity with its difference from the run; loss parts are those of this rank."""
    rollout, samples = recording.rollout, samples_of(recording)
    for name in SIGNAL:
        yield name, difference(name, getattr(rollout, name), getattr(replayed.rollout, name), samples)
    recorded = [step["parts"] for step in recording.header["steps"]]
    steps = [f"step {number}" for number in range(len(recorded))]
    for name in dict.fromkeys(name for parts in [*recorded, *replayed.parts] for name in parts):
        figures = [[float(parts.get(name, "nan")) for parts in each] for each in (recorded, replayed.parts)]
        ours, theirs = torch.tensor(figures, dtype=torch.float64)
        yield name, difference(name, ours, theirs, steps)
    for number, gradient in enumerate(replayed.gradients):
        label = f"gradient of pass {number}"
        yield label, difference(label, recording.tensors.get(f"pass/{number}/gradient"), gradient, samples)


def recording_differences(ours: Recording, theirs: Recording) -> Iterator[Difference]:
    """Yield the differences of two recordings in order of computation: options, rollout, passes, steps."""
    yield from json_differences(ours.header["options"], theirs.header["options"], "option ")
    yield from json_differences(ours.header["algorithm"], theirs.header["algorithm"])
    for name in sorted({*ours.tensors, *theirs.tensors}, key=_order):
        tensors = difference(name, ours.tensors.get(name), theirs.tensors.get(name), samples_of(ours))
        if tensors is not None:
            yield tensors
    steps = ours.header["steps"], theirs.header["steps"]
    for number, pair in enumerate(zip(*steps, strict=False)):
        yield from json_differences(*pair, f"step {number} ")
    if len(steps[0]) != len(steps[1]):
        yield Difference(what="number of steps", values=(str(len(steps[0])), str(len(steps[1]))))


def json_differences(ours: Any, theirs: Any, prefix: str = "") -> Iterator[Difference]:
    """Yield the differences of two descriptions (:mod:`lightning_rl.serialization`)."""
    for path, one, other in changes(ours, theirs):
        yield Difference(what=f"{prefix}{path}", values=(_short(one), _short(other)))


def samples_of(recording: Recording) -> list[str]:
    """Return the names of the rows of a recording."""
    return [f"sample {number}" for number in recording.tensors["rollout/sample_ids"].tolist()]


def _order(name: str) -> tuple[int, int, str]:
    kind, _, rest = name.partition("/")
    stem = rest.partition("/")[0]
    return ("rollout", "sampled", "pass").index(kind), ORDER.index(stem) if stem in ORDER else 0, name


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get(CLASS) or value.get(NAME) or dict(value))
    return "nothing" if value is None else str(value)


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
