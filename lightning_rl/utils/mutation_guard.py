"""Detection of in-place edits: callbacks that write to read-only tensors, or hook their gradients."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.utils.device import to_device

Fields = Sequence[tuple[str, Tensor]]
WORD = 8  # bytes
ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
COMPARED = ATOMS | {set}
MIXER = -7046029254386353131  # odd, half of its bits set: 2**64 over the golden ratio, as a signed number
NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size, for dtypes numpy lacks


class FieldSeal(NamedTuple):
    """State of one tensor; :attr:`Seal.device` holds the checksums of tensors on an accelerator.

    Attributes:
        tensor: The tensor.
        version: Its version counter, which `.data`, `.numpy()` and pointers bypass.
        form: Data pointer, shape and strides.
        bytes: Buffer of its elements; None if the tensor is not contiguous, or on an accelerator.
        sum: Checksum of its elements; 0 on an accelerator.
    """

    tensor: Tensor
    version: int
    form: tuple[Any, ...]
    bytes: Any
    sum: int


@dataclass(frozen=True, slots=True)
class Seal:
    """State of some tensors; two seals of the same tensors differ if one was written to in between.

    Attributes:
        fields: State of each tensor by name.
        device: Names and checksums [N] int64 of the tensors of each accelerator, computed asynchronously.
    """

    fields: dict[str, FieldSeal]
    device: tuple[tuple[tuple[str, ...], Tensor], ...] = ()

    @staticmethod
    def of(fields: Fields, last: "Seal | None" = None) -> "Seal":
        """Return a seal of the current values; does not wait for an accelerator.

        Args:
            fields: Names and tensors; a tensor with two names is read once.
            last: Earlier seal of the same fields, which saves some work.
        """
        known = {} if last is None else last.fields
        sealed, places = dict[str, FieldSeal](), dict[int, FieldSeal]()
        elsewhere: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in fields:
            twin = places.get(id(tensor))
            if twin is None:
                twin = places[id(tensor)] = _seal_field(tensor, known.get(name))
            sealed[name] = twin
            if not tensor.is_cpu:
                elsewhere.setdefault(tensor.device, []).append((name, tensor))
        device = [(tuple(name for name, _ in part), device_checksums(part)) for part in elsewhere.values()]
        return Seal(sealed, tuple(device))

    def holds(self, fields: Fields) -> bool:
        """Return True if the fields are unchanged; False also if that needs a full comparison (:meth:`compare`)."""
        if self.device or len(fields) != len(self.fields):
            return False
        for (name, tensor), (known, sealed) in zip(fields, self.fields.items(), strict=True):
            if tensor is not sealed.tensor or tensor._version != sealed.version or name != known:  # noqa: SLF001
                return False
            if sealed.form != (tensor.data_ptr(), tensor.shape, tensor.stride()):
                return False
            if zlib.crc32(buffer_of(tensor) if sealed.bytes is None else sealed.bytes) != sealed.sum:
                return False
        return True

    def compare(self, later: "Seal") -> "Comparison":
        """Compare with a later seal of the fields; does not wait for an accelerator."""
        here, there = _device_sums(self), _device_sums(later)
        changed, sums = dict[str, bool](), dict[str, tuple[Tensor, Tensor]]()
        for name in {**self.fields, **later.fields}:
            before, after = self.fields.get(name), later.fields.get(name)
            changed[name] = before is None or after is None or before.sum != after.sum or not _same_field(before, after)
            if not changed[name] and name in here and name in there:
                sums[name] = here[name], there[name]
        return Comparison(changed, sums)

    def changes(self, later: "Seal") -> list[str]:
        """Return the fields that were written, replaced, added or removed since; waits for an accelerator."""
        return self.compare(later).changes()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two seals of the same fields, without the tensors.

    Attributes:
        changed: True by name for each field that is known to differ.
        sums: Checksums [] int64 before and after, of the other fields on an accelerator.
    """

    changed: dict[str, bool]
    sums: dict[str, tuple[Tensor, Tensor]]

    def flags(self) -> list[Tensor]:
        """Return flags [] bool, of which one is True if a field differs; does not wait for an accelerator."""
        sure = [torch.tensor(data=True)] if any(self.changed.values()) else []
        pairs = list(self.sums.values())
        if pairs:
            before, after = (torch.stack(sums) for sums in zip(*pairs, strict=True))
            sure.append((before != after).any())
        return sure

    def changes(self) -> list[str]:
        """Return the names of changed fields, in order; waits for an accelerator."""
        differ = {name: bool(before != after) for name, (before, after) in self.sums.items()}
        return [name for name, changed in self.changed.items() if changed or differ.get(name, False)]


def _seal_field(tensor: Tensor, last: FieldSeal | None) -> FieldSeal:
    version, on_cpu = tensor._version, tensor.is_cpu  # noqa: SLF001
    form = (tensor.data_ptr() if on_cpu else 0, tensor.shape, tensor.stride())
    if not on_cpu:
        return FieldSeal(tensor, version, form, None, 0)
    if last is not None and last.bytes is not None and last.tensor is tensor and last.form == form:
        return FieldSeal(tensor, version, form, last.bytes, zlib.crc32(last.bytes))
    buffer = buffer_of(tensor)
    return FieldSeal(tensor, version, form, buffer if tensor.is_contiguous() else None, zlib.crc32(buffer))


def _device_sums(seal: Seal) -> dict[str, Tensor]:
    return {name: place for names, sums in seal.device for name, place in zip(names, sums.unbind(), strict=True)}


def _same_field(before: FieldSeal, after: FieldSeal) -> bool:
    """Return True if both are the same tensor with the same version and shape."""
    same = before.tensor is after.tensor and before.version == after.version
    return same and before.form[1] == after.form[1]


def buffer_of(tensor: Tensor) -> Any:
    """Return the elements of a CPU tensor as a buffer for :func:`zlib.crc32`; a copy if it is not contiguous."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 and other dtypes that numpy lacks
        return tensor.view(NUMBERS[tensor.element_size()]).numpy()


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the elements of a CPU tensor; detects every change of up to 32 neighboring bits.

    Example:
        >>> rewards = torch.tensor([1.0, 0.0])
        >>> before = checksum(rewards)
        >>> rewards.numpy()[0] = 2.0
        >>> checksum(rewards) == before
        False
    """
    return zlib.crc32(buffer_of(tensor))


def device_checksums(fields: Fields) -> Tensor:
    """Return a checksum of each of N tensors of one device, [N] int64, in a few kernels and without synchronization.

    The bytes are read as 64-bit words x_i. The checksum is the sum of w_i mix(x_i) modulo 2^64 with odd weights w_i
    that depend on the position i, so it detects a change of any single word and of the order.
    """
    pieces, ends, number = list[Tensor](), list[int](), 0
    for _, tensor in fields:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        pieces += [flat, flat.new_zeros(-len(flat) % WORD + (0 if len(flat) else WORD))]
        number += -(-len(flat) // WORD) or 1
        ends.append(number - 1)
    words = torch.cat(pieces).view(torch.int64) * MIXER
    words ^= words >> 32
    weights = (torch.arange(number, device=words.device) * MIXER) | 1
    sums = (words * weights).cumsum(0)
    totals = torch.stack([sums[end] for end in ends])  # indexing with a list would synchronize
    return torch.diff(totals, prepend=totals.new_zeros(1))


class _Link(NamedTuple):
    """Autograd state of one tensor.

    Attributes:
        tensor: The tensor.
        required: Its ``requires_grad``.
        node: Its ``grad_fn``; None for a leaf.
        hooks: Hooks and pre-hooks of the node.
        own: Number of hooks of the tensor.
    """

    tensor: Tensor
    required: bool
    node: Any
    hooks: tuple[Mapping[Any, Any], ...]
    own: int = 0


class GradientSeal:
    """Autograd state of some tensors, to detect added hooks and detached graphs.

    A hook can replace the gradient of the whole loss without a change of any value, so checksums do not detect it.
    ``retain_grad`` only keeps a copy and is allowed.

    Args:
        fields: Names and tensors.
    """

    def __init__(self, fields: Fields) -> None:
        self._links = {name: _link(tensor) for name, tensor in fields}

    def refuse(self, who: str, cure: str) -> None:
        """Raise EditError if a hook was added or a graph replaced since construction."""
        if names := " and of ".join(name for name, link in self._links.items() if _has_another_way(link)):
            raise EditError(
                f"{who} registered a hook on the gradient of {names}, or detached it, which changes the gradient of "
                f"the whole loss: {cure}"
            )


def _link(tensor: Tensor) -> _Link:
    if not tensor.requires_grad:
        return _Link(tensor, required=False, node=None, hooks=())
    node = tensor.grad_fn
    hooks = () if node is None else _node_hooks(node)
    return _Link(tensor, required=True, node=node, hooks=hooks, own=len(tensor._backward_hooks or ()))  # noqa: SLF001


def _node_hooks(node: Any) -> tuple[Mapping[Any, Any], ...]:
    """Return hooks and pre-hooks of a node; torch exposes them only through the handle of a registered hook."""
    found = []
    for hang in (node.register_hook, node.register_prehook):
        handle = hang(_nothing)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return tuple(found)


def _nothing(*_: Any) -> None:
    pass


def _has_another_way(link: _Link) -> bool:
    tensor, required, node, hooks, own = link
    if not required:
        return tensor.requires_grad
    return len(tensor._backward_hooks or ()) != own or tensor.grad_fn is not node or any(hooks)  # noqa: SLF001


class EditError(RuntimeError):
    """A callback modified a read-only tensor in place."""


class WeightEditError(EditError):
    """A callback modified the policy's weights in place, so a checkpoint would contain the edit."""


class EditWatch:
    """Checks fields for edits after each callback that reads them.

    Edits on the CPU raise immediately. Edits on an accelerator raise in :meth:`close` or at the end of
    :func:`comparing_later`, after one synchronization.

    Args:
        fields: Function that returns names and current tensors.
        subject: Object that the fields belong to.

    Attributes:
        gradients: Autograd state of the tensors at construction.
    """

    def __init__(self, fields: Callable[[], Fields], subject: object = None) -> None:
        self.subject, self._fields = subject, fields
        shown = fields()
        self._last, self.gradients = Seal.of(shown), GradientSeal(shown)
        self._waiting: list[Suspicion] = []

    def after(self, who: str, cure: str) -> None:
        """Compare the fields with the previous call.

        Args:
            who: Name of the callback that ran since.
            cure: Advice for the message.

        Raises:
            EditError: If a field on the CPU or a gradient was edited.
        """
        fields = self._fields()
        self.gradients.refuse(who, cure)
        if self._last.holds(fields):
            return
        before, self._last = self._last, Seal.of(fields, self._last)
        if before.device or self._last.device:
            self._waiting.append(Suspicion(who, cure, before.compare(self._last)))
        else:
            refuse_edits(who, before.changes(self._last), cure)

    def close(self) -> None:
        """Raise EditError for the first edit on an accelerator, or defer that to :func:`comparing_later`."""
        waiting, self._waiting = self._waiting, []
        later = _later.get()
        if later is None:
            _refuse_first(waiting)
        else:
            later.extend(waiting)


class Suspicion(NamedTuple):
    """A possible edit on an accelerator, not synchronized yet."""

    who: str
    cure: str
    comparison: Comparison


_later: ContextVar[list[Suspicion] | None] = ContextVar("later", default=None)


@contextmanager
def comparing_later() -> Iterator[None]:
    """Defer the comparisons on an accelerator to the end of the block, for a single synchronization.

    Raises:
        EditError: At the end, for the first edit.
    """
    later = list[Suspicion]()
    token = _later.set(later)
    try:
        yield
    finally:
        _later.reset(token)
    _refuse_first(later)


def _refuse_first(suspicions: Sequence[Suspicion]) -> None:
    flags = [flag for suspicion in suspicions for flag in suspicion.comparison.flags()]
    if not flags or not torch.stack([to_device(flag, flags[-1].device) for flag in flags]).any():
        return
    for who, cure, comparison in suspicions:
        refuse_edits(who, comparison.changes(), cure)


def refuse_edits(who: str, fields: Iterable[str], cure: str) -> None:
    """Raise EditError if there are edited fields."""
    if names := ", ".join(fields):
        raise EditError(f"{who} wrote in place to {names}: {cure}")


def refuse_grad_mode(who: str, *, enabled: bool) -> None:
    """Restore the gradient mode, and raise EditError if it was changed."""
    if torch.is_grad_enabled() != enabled:
        torch.set_grad_enabled(enabled)
        raise EditError(
            f"{who} left gradients switched {'off' if enabled else 'on'} for the callbacks after it: use `with "
            "torch.no_grad():` around its own lines"
        )


def copy_plain(value: Any) -> Any:
    """Return a deep copy of lists, dicts, tuples, sets, arrays and tensors; other objects are shared.

    Example:
        >>> rows = [{"role": "user", "content": "2 + 2?"}]
        >>> copy_plain(rows)[0].clear()
        >>> rows
        [{'role': 'user', 'content': '2 + 2?'}]
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind in (list, tuple):
        return kind([entry if type(entry) in ATOMS else copy_plain(entry) for entry in value])
    if kind is dict:
        return {key: copy_plain(entry) for key, entry in value.items()}
    if kind is set or kind is np.ndarray:
        return value.copy()
    return value.clone() if kind is Tensor else value


def same_plain(first: Any, second: Any) -> bool:
    """Return True if a value equals its copy by :func:`copy_plain`; shared objects are compared by identity."""
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind in (list, tuple):
        alike = len(first) == len(second)
        return alike and (all(map(is_, first, second)) or all(map(same_plain, first, second)))
    if kind is dict:
        return list(first) == list(second) and all(same_plain(first[key], second[key]) for key in first)
    if kind is np.ndarray or kind is Tensor:
        return first.shape == second.shape and bool(((first == second) | (first != first)).all())
    return kind in COMPARED and bool(first == second)


def changed_entries(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys of a dict whose values have changed."""
    return [key for key in {**before, **after} if not same_plain(before.get(key), after.get(key))]
