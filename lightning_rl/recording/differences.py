"""Differences: where two computations of one thing part, named by sample and position."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rl.recording.recording import Recording
from lightning_rl.recording.replay import Replayed
from lightning_rl.recording.serialize import NAME, OBJECT, rebuilt

FIRST = (
    "prompt_ids",
    "prompt_lengths",
    "response_ids",
    "response_lengths",
    "action_mask",
    "groups",
    "sample_ids",
    "finish",
    "policy_version",
    "rollout_logprobs",
    "task_rewards",
    "rewards",
    "extras",
    "token_extras",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "trained",
    "rewarded",
    "valid_tokens",
    "advantages",
    "returns",
)  # fmt: skip  in the order in which they come to be
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not the same twice.

    Attributes:
        what: its name.
        number: how many of its entries differ; 0 if it is there once, or in another shape, or no tensor.
        largest: the largest absolute difference of two entries.
        scale: the largest finite magnitude on our side.
        place: the first one: a sample or step, and the position in it.
        values: what stands there on either side.
    """

    what: str
    number: int = 0
    largest: float = 0.0
    scale: float = 0.0
    place: str = ""
    values: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        """One line for a console."""
        sides = f"{self.values[0]} against {self.values[1]}"
        return (
            f"{self.number} differ by up to {self.largest:.3g}, first {self.place}: {sides}" if self.number else sides
        )

    @property
    def rounding(self) -> bool:
        """Whether another device or build of torch explains it."""
        return bool(self.number) and self.largest <= ROUNDING * self.scale


def difference(what: str, ours: Tensor | None, theirs: Tensor | None, rows: list[str]) -> Difference | None:
    """Compares bit for bit, NaN equal to NaN.

    Args:
        what: a name.
        ours: shape [B, ...].
        theirs: of the same shape, or not.
        rows: what the entries of the first axis are called, B of them.
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
        what=what, number=int(unequal.sum()), largest=float(gaps.max()), scale=float(finite.abs().max()),
        place=rows[first[0]] + (f", position {first[1]}" if len(first) > 1 else ""),
        values=(f"{ours[first].item()!r}", f"{theirs[first].item()!r}"),
    )  # fmt: skip


def recorded_differences(recording: Recording, found: Replayed) -> Iterator[tuple[str, Difference | None]]:
    """Every recomputed quantity with its difference from what the run had; parts of the loss are this rank's share."""
    rollout, samples = recording.rollout, samples_of(recording)
    for name in ("trained", "rewarded", "valid_tokens", "advantages", "returns"):
        yield name, difference(name, getattr(rollout, name), getattr(found.rollout, name), samples)
    recorded = [rebuilt(step["parts"]) for step in recording.header["steps"]]
    steps = [f"step {number}" for number in range(len(recorded))]
    for name in dict.fromkeys(name for parts in [*recorded, *found.parts] for name in parts):
        ours, theirs = ([_number(parts.get(name)) for parts in each] for each in (recorded, found.parts))
        yield name, difference(name, _column(ours), _column(theirs), steps)
    for number, gradient in enumerate(found.gradients):
        label = f"gradient of pass {number}"
        yield label, difference(label, recording.tensors.get(f"pass/{number}/gradient"), gradient, samples)


def recording_differences(ours: Recording, theirs: Recording) -> Iterator[Difference]:
    """Where two recordings differ, in the order in which things come to be: options, rollout, passes, steps."""
    yield from described_differences(ours.header["options"], theirs.header["options"], "option ")
    yield from described_differences(ours.header["configuration"], theirs.header["configuration"])
    for name in sorted({*ours.tensors, *theirs.tensors}, key=_order):
        found = difference(name, ours.tensors.get(name), theirs.tensors.get(name), samples_of(ours))
        if found is not None:
            yield found
    steps = ours.header["steps"], theirs.header["steps"]
    for number, (one, other) in enumerate(zip(*steps, strict=False)):
        yield from described_differences(one, other, f"step {number} ")
    if len(steps[0]) != len(steps[1]):
        yield Difference(what="number of steps", values=(str(len(steps[0])), str(len(steps[1]))))


def described_differences(ours: Any, theirs: Any, place: str = "") -> Iterator[Difference]:
    """Where two descriptions (:mod:`lightning_rl.recording.serialize`) hold other values."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in dict.fromkeys([*ours, *theirs]):
            inner = place if key in (OBJECT, "state", NAME) else f"{place}{key}."
            yield from described_differences(ours.get(key), theirs.get(key), inner)
    elif ours != theirs:
        yield Difference(what=place.removesuffix("."), values=(_short(ours), _short(theirs)))


def samples_of(recording: Recording) -> list[str]:
    """What the rows of a recording are called."""
    return [f"sample {number}" for number in recording.tensors["rollout/sample_ids"].tolist()]


def _order(name: str) -> tuple[int, int, str]:
    kind, _, rest = name.partition("/")
    stem = rest.partition("/")[0]
    return ("rollout", "drawn", "pass").index(kind), FIRST.index(stem) if stem in FIRST else 0, name


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get(OBJECT) or value.get(NAME) or dict(value))
    return "nothing" if value is None else str(value)


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
