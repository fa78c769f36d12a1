"""Fields: declaration of the tensors of a rollout; an axis holds the operations on the tensors that lie along it."""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

Value = TypeVar("Value")
Function = Callable[[Tensor, "Axis[Any]", float], Tensor]


class Shapes(NamedTuple):
    """First sizes of the tensors along each axis: (8,), (8, 20) and (8, 64) with 8 rows."""

    row: tuple[int, ...]
    prompt: tuple[int, ...]
    token: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, prompt: int, width: int) -> "Shapes":
        """Return the shapes of rows with some prompt and response positions."""
        return cls((rows,), (rows, prompt), (rows, width))


class Axis(ABC, Generic[Value]):
    """Operations on the values of fields along an axis: each is a tensor, or an object that holds several."""

    @abstractmethod
    def check(self, name: str, value: Value, shapes: Shapes, *, exact: bool) -> None:
        """Check the shape of a value.

        Args:
            name: Name of the value in messages.
            value: Value.
            shapes: Shapes of the rollout.
            exact: True if the value has no dimensions behind those of the axis.

        Raises:
            ValueError: If the shape does not match.
        """

    @abstractmethod
    def select(self, value: Value, rows: Int[Tensor, " b"], width: int | None) -> Value:
        """Select rows, and at most ``width`` response positions."""

    @abstractmethod
    def resize(self, value: Value, width: int, pad: float) -> Value:
        """Cut or pad the response positions."""

    @abstractmethod
    def concatenate(self, values: Sequence[Value], shapes: Shapes, pad: float) -> Value:
        """Concatenate along rows, padded to the positions of ``shapes``."""

    @abstractmethod
    def padding(self, value: Value, rows: int, pad: float) -> Value:
        """Return the value of padding rows beside ``value``."""

    @abstractmethod
    def map(self, value: Value, function: Function, pad: float) -> Value:
        """Apply ``function(tensor, axis, pad)``, which keeps the number of items."""

    @abstractmethod
    def tensors(self, name: str, value: Value) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of a value: one under ``name``, several under ``name/part``."""

    @abstractmethod
    def restore(self, parts: Mapping[str, Tensor]) -> Value:
        """Return the value of tensors by part; the only one of a value has an empty name."""

    def split(self, name: str) -> tuple[str, str]:
        """Return the name of a value and that of its part, which :meth:`tensors` joins."""
        return name, ""


class RowAxis(Axis[Tensor]):
    """Tensors [B, ...]."""

    place = 0  # in Shapes

    @override
    def check(self, name: str, value: Tensor, shapes: Shapes, *, exact: bool) -> None:
        expected = shapes[self.place]
        if (value.shape if exact else value.shape[: len(expected)]) != expected:
            raise ValueError(f"expected {name} of shape {list(expected)}, got {list(value.shape)}")

    @override
    def select(self, value: Tensor, rows: Int[Tensor, " b"], width: int | None) -> Tensor:
        return value.index_select(0, rows)

    @override
    def resize(self, value: Tensor, width: int, pad: float) -> Tensor:
        return value

    @override
    def concatenate(self, values: Sequence[Tensor], shapes: Shapes, pad: float) -> Tensor:
        if self.place:
            values = [_resize(value, shapes[self.place][1], pad) for value in values]
        return torch.cat(list(values))

    @override
    def padding(self, value: Tensor, rows: int, pad: float) -> Tensor:
        return value.new_full((rows, *value.shape[1:]), pad)

    @override
    def map(self, value: Tensor, function: Function, pad: float) -> Tensor:
        return function(value, self, pad)

    @override
    def tensors(self, name: str, value: Tensor) -> Iterable[tuple[str, Tensor]]:
        return ((name, value),)

    @override
    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""]


class PromptAxis(RowAxis):
    """Tensors [B, P, ...]."""

    place = 1


class TokenAxis(RowAxis):
    """Tensors [B, T, ...]."""

    place = 2

    @override
    def select(self, value: Tensor, rows: Int[Tensor, " b"], width: int | None) -> Tensor:
        return (value if width is None else value[:, :width]).index_select(0, rows)

    @override
    def resize(self, value: Tensor, width: int, pad: float) -> Tensor:
        return _resize(value, width, pad)


ROW, PROMPT, TOKEN = RowAxis(), PromptAxis(), TokenAxis()


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Items of rows, one row after the other: 3 pictures of 2 rows are values [3, ...] and counts [2, 1].

    Args:
        values: Items.
        counts: Number of items of each row; on the CPU at all times, because an accelerator would synchronize.
        starts: Index of the first item of each row, on the CPU, if rows share items; None if they follow each other.

    Raises:
        ValueError: If the items of a row are not among the values, or belong to no row.
    """

    values: Shaped[Tensor, "N ..."]
    counts: Int[Tensor, " B"]
    starts: Int[Tensor, " B"] | None = None

    def __post_init__(self) -> None:
        """Move counts and starts to the CPU and check their range."""
        object.__setattr__(self, "counts", self.counts.cpu())
        begins = self.counts.cumsum(0) - self.counts
        total = int(self.counts.sum() if self.starts is None else max([0, *(self.starts.cpu() + self.counts).tolist()]))
        object.__setattr__(self, "starts", begins if self.starts is None else self.starts.cpu())
        if total != len(self.values):
            raise ValueError(f"expected counts of {len(self.values)} items, got a sum of {total}")

    @property
    def begins(self) -> Int[Tensor, " B"]:
        """Index of the first item of each row."""
        return cast(Tensor, self.starts)

    def of_row(self, row: int) -> Shaped[Tensor, "n ..."]:
        """Return the items of one row."""
        begin = int(self.begins[row])
        return self.values[begin : begin + int(self.counts[row])]


@dataclass(frozen=True, slots=True)
class Items(Axis[Ragged]):
    """Axis of items, of which rows have different numbers: [N, ...].

    Args:
        name: Name of the items, in the plural.
        dtype: Dtype of the items; None for any.
        shared: True if rows may share items, which exist once then.
    """

    name: str
    dtype: torch.dtype | None = None
    shared: bool = False

    @override
    def check(self, name: str, value: Ragged, shapes: Shapes, *, exact: bool) -> None:
        if value.counts.dtype != torch.int64 or (value.counts < 0).any():
            raise ValueError(f"expected {name}/counts of int64, at least 0, got {value.counts.dtype}: {value.counts}")
        if self.dtype not in (None, value.values.dtype):
            raise ValueError(f"expected {name}/values of {self.dtype}, got {value.values.dtype}")
        if value.counts.shape != shapes.row:
            raise ValueError(f"expected {name} of {shapes.row[0]} rows, got counts of {len(value.counts)}")

    @override
    def select(self, value: Ragged, rows: Int[Tensor, " b"], width: int | None) -> Ragged:
        rows = rows.cpu()
        counts, starts = value.counts[rows], value.begins[rows]
        if not self.shared:
            return Ragged(value.values.index_select(0, spans(starts, counts).to(value.values.device)), counts)
        first = first_with_items(starts, counts)
        own = torch.where(first == torch.arange(len(rows)), counts, 0)
        index = spans(starts, own).to(value.values.device)
        return Ragged(value.values.index_select(0, index), counts, (own.cumsum(0) - own)[first])

    @override
    def resize(self, value: Ragged, width: int, pad: float) -> Ragged:
        return value

    @override
    def concatenate(self, values: Sequence[Ragged], shapes: Shapes, pad: float) -> Ragged:
        parts = [value.values for value in values]
        counts = torch.cat([value.counts for value in values])
        if self.shared:
            offsets = itertools.accumulate([0, *map(len, parts)])
            starts = torch.cat([value.begins + offset for value, offset in zip(values, offsets, strict=False)])
            return Ragged(concatenate_items([part for part in parts if len(part)] or parts[:1]), counts, starts)
        kinds = {(part.dtype, tuple(part.shape[1:])): None for part in parts}
        if len(kinds) > 1:
            first, other, *_ = (
                f"{dtype} of shape [n{''.join(f', {size}' for size in shape)}]" for dtype, shape in kinds
            )
            raise ValueError(f"expected {self.name} of one dtype and shape in all rows, got {first} and {other}")
        return Ragged(torch.cat(parts), counts)

    @override
    def padding(self, value: Ragged, rows: int, pad: float) -> Ragged:
        return Ragged(value.values[:0], value.counts.new_zeros(rows))

    @override
    def map(self, value: Ragged, function: Function, pad: float) -> Ragged:
        return Ragged(function(value.values, self, pad), value.counts, value.starts)

    @override
    def tensors(self, name: str, value: Ragged) -> Iterable[tuple[str, Tensor]]:
        starts = ((f"{name}/starts", value.begins),) if self.shared else ()
        return (f"{name}/values", value.values), (f"{name}/counts", value.counts), *starts

    @override
    def restore(self, parts: Mapping[str, Tensor]) -> Ragged:
        if missing := {"values", "counts"} - parts.keys():
            raise ValueError(f"expected {self.name}/{min(missing)}, got none")
        return Ragged(parts["values"], parts["counts"], parts.get("starts"))

    @override
    def split(self, name: str) -> tuple[str, str]:
        value, _, part = name.rpartition("/")
        return value, part


def first_with_items(starts: Int[Tensor, " B"], counts: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return for each row the first one that has the same items."""
    first: dict[tuple[int, int], int] = {}
    pairs = zip(starts.tolist(), counts.tolist(), strict=True)
    return torch.tensor([first.setdefault(pair, row) for row, pair in enumerate(pairs)], dtype=torch.int64)


def concatenate_items(values: Sequence[Shaped[Tensor, "N ..."]]) -> Shaped[Tensor, "N ..."]:
    """Concatenate tensors along the first axis, padded with 0 behind to the largest sizes of the others."""
    sizes = [max(size) for size in zip(*(value.shape[1:] for value in values), strict=True)]

    def pad(value: Tensor) -> Tensor:
        missing = [size - own for size, own in zip(sizes, value.shape[1:], strict=True)]
        return functional.pad(value, [amount for more in reversed(missing) for amount in (0, more)])

    return torch.cat([pad(value) if list(value.shape[1:]) != sizes else value for value in values])


def spans(starts: Int[Tensor, " s"], lengths: Int[Tensor, " s"]) -> Int[Tensor, " N"]:
    """Return the indices of spans, one after another; sorting a key of each index would take longer."""
    number, shift = int(lengths.sum()), starts - (lengths.cumsum(0) - lengths)
    return torch.arange(number, device=starts.device) + shift.repeat_interleave(lengths, output_size=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Declaration of a field: ``policy_version``, a tensor along ``TOKEN``, padded with -1.

    Attributes:
        name: Name of the field.
        axis: Axis of its values.
        pad: Value of padding.
        is_mapping: True for a mapping from names to values.
        shown: True for numbers per token that the report shows.
        sparse: True if NaN marks rows without a value.
        output: Name in ``Outputs`` of a field that the policy's forward computes; empty for another one.
        inputs: Entries of dict fields from which the forward computes it, and without which it is None.
        is_argument: True for arguments of the model by name, which only layouts read: they stay on the CPU, rows of
            microbatches lack them, and an entry that a part of a rollout lacks is padding there.
    """

    name: str
    axis: Axis[Any]
    pad: float
    is_mapping: bool
    shown: bool
    sparse: bool
    output: str
    inputs: tuple[str, ...]
    is_argument: bool

    def restore(self, parts: Mapping[str, Tensor]) -> Any:
        """Return the value of the field, given its tensors by what follows the name of the field and a slash."""
        if not self.is_mapping:
            return self.axis.restore(parts)
        entries: dict[str, dict[str, Tensor]] = {}
        for key, tensor in parts.items():
            name, part = self.axis.split(key)
            entries.setdefault(name, {})[part] = tensor
        return {name: self.axis.restore(entry) for name, entry in entries.items()}


def declare(
    axis: Axis[Any],
    *,
    pad: float = 0,
    shown: bool = False,
    sparse: bool = False,
    output: str = "",
    inputs: tuple[str, ...] = (),
    is_argument: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a field of a dataclass; see :class:`Field`."""
    names = {"axis": axis, "pad": pad, "shown": shown, "sparse": sparse, "output": output, "inputs": inputs}
    return {**names, "is_argument": is_argument}


@cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the declared fields of a dataclass, in order."""
    return tuple(
        Field(name=spec.name, is_mapping=spec.default_factory is dict, **spec.metadata)
        for spec in dataclasses.fields(kind)
    )


def _resize(tensor: Shaped[Tensor, "B L ..."], width: int, pad: float) -> Shaped[Tensor, "B W ..."]:
    current = tensor.shape[1]
    if current >= width:
        return tensor[:, :width]
    return torch.cat([tensor, tensor.new_full((len(tensor), width - current, *tensor.shape[2:]), pad)], 1)
