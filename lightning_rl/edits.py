"""Edits: who wrote to the fields of a value that was only shown, or to their gradients, by whatever way it was done."""

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

from lightning_rl.transfer import to_device

Fields = Sequence[tuple[str, Tensor]]
WORD = 8  # bytes
ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
COMPARED = ATOMS | {set}
MIXER = -7046029254386353131  # odd, half of its bits set: 2**64 over the golden ratio, as a signed number
NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the size of a dtype that numpy lacks


class FieldSeal(NamedTuple):
    """One field at a time; on an accelerator the checksum is kept with those of the other fields.

    Attributes:
        tensor: that the field was.
        version: its count of writes in place, other than through `.data`, `.numpy()` or a pointer.
        form: where and how its elements lie in memory.
        bytes: those elements, to be read again; None if they do not lie side by side, or on an accelerator.
        sum: their checksum; 0 on an accelerator.
    """

    tensor: Tensor
    version: int
    form: tuple[Any, ...]
    bytes: Any
    sum: int


@dataclass(frozen=True, slots=True)
class Seal:
    """What some tensors held at a time: two seals of the same tensors differ if anybody wrote in between.

    Attributes:
        fields: by name.
        device: names of the fields of each other device, with their checksums [N] int64, which nobody has waited for.
    """

    fields: dict[str, FieldSeal]
    device: tuple[tuple[tuple[str, ...], Tensor], ...] = ()

    @staticmethod
    def of(fields: Fields, last: "Seal | None" = None) -> "Seal":
        """The seal of some fields as they are now; fields of an accelerator are read there, without waiting.

        Args:
            fields: tensors with their names; a tensor that has two names is read once.
            last: of the same fields at an earlier time, which saves some work.
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
        """Whether the same fields on the CPU surely are as they were; where it cannot tell in haste, it says no."""
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
        """What a later seal of the fields says beside this one; an accelerator is not waited for."""
        here, there = _device_sums(self), _device_sums(later)
        changed, sums = dict[str, bool](), dict[str, tuple[Tensor, Tensor]]()
        for name in {**self.fields, **later.fields}:
            before, after = self.fields.get(name), later.fields.get(name)
            changed[name] = before is None or after is None or before.sum != after.sum or not _same_field(before, after)
            if not changed[name] and name in here and name in there:
                sums[name] = here[name], there[name]
        return Comparison(changed, sums)

    def changes(self, later: "Seal") -> list[str]:
        """The fields that were written, replaced, added or taken away until a later seal, in their order; waits for an
        accelerator.
        """
        return self.compare(later).changes()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two seals of the same tensors beside each other, without the tensors.

    Attributes:
        changed: whether a field surely is another one, by name.
        sums: checksums [] int64 of the others on an accelerator, before and after.
    """

    changed: dict[str, bool]
    sums: dict[str, tuple[Tensor, Tensor]]

    def flags(self) -> list[Tensor]:
        """Whether there is any change, as flags [] bool that nobody has waited for."""
        sure = [torch.tensor(data=True)] if any(self.changed.values()) else []
        pairs = list(self.sums.values())
        if pairs:
            before, after = (torch.stack(sums) for sums in zip(*pairs, strict=True))
            sure.append((before != after).any())
        return sure

    def changes(self) -> list[str]:
        """The fields that were changed, in their order; waits for an accelerator."""
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
    """Whether a field with the same checksum is the same tensor, of the same shape, that nobody wrote to."""
    same = before.tensor is after.tensor and before.version == after.version
    return same and before.form[1] == after.form[1]


def buffer_of(tensor: Tensor) -> Any:
    """The elements of a tensor on the CPU as what :func:`zlib.crc32` reads; a copy if they do not lie side by side."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 and what else numpy does not have
        return tensor.view(NUMBERS[tensor.element_size()]).numpy()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the elements of a tensor on the CPU, which every change of up to 32 neighbouring bits changes.

    Example:
        >>> rewards = torch.tensor([1.0, 0.0])
        >>> before = checksum(rewards)
        >>> rewards.numpy()[0] = 2.0
        >>> checksum(rewards) == before
        False
    """
    return zlib.crc32(buffer_of(tensor))


def device_checksums(fields: Fields) -> Tensor:
    """A checksum of each of some tensors of one device, [N] int64, in a few kernels and without synchronization.

    The bytes are read as 64-bit words x_i; the checksum is the sum of w_i mix(x_i) modulo 2^64 with odd weights w_i
    that depend on the place, so that a change of any one word changes it, and one of the order does.
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
    totals = torch.stack([sums[end] for end in ends])  # a list as index would be copied to the device, and waited for
    return torch.diff(totals, prepend=totals.new_zeros(1))


class _Link(NamedTuple):
    """How one field hangs in the graph of the backward.

    Attributes:
        tensor: that the field is.
        required: whether it has a gradient.
        node: that made it; None for a leaf.
        hooks: of the node, before and after it; empty, unless somebody hangs one there.
        own: how many hooks the tensor has.
    """

    tensor: Tensor
    required: bool
    node: Any
    hooks: tuple[Mapping[Any, Any], ...]
    own: int = 0


class GradientSeal:
    """Whose gradients nobody has hung anything on: hooks of tensors and of the nodes that made them, and the nodes.

    A hook sees the gradient of everybody's loss, and what it returns trains in its place: no value that is shown is
    another one, so no checksum notices. ``retain_grad`` keeps a copy and is nobody's concern.

    Args:
        fields: tensors with their names.
    """

    def __init__(self, fields: Fields) -> None:
        self._links = {name: _link(tensor) for name, tensor in fields}

    def refuse(self, who: str, cure: str) -> None:
        """Raises if gradients go another way now, or could.

        Raises:
            EditError: naming who, and whose gradient.
        """
        if names := " and of ".join(name for name, link in self._links.items() if _has_another_way(link)):
            raise EditError(
                f"{who} hung a hook on the gradient of {names}, or cut it, which changes what everybody else's loss "
                f"trains: {cure}"
            )


def _link(tensor: Tensor) -> _Link:
    if not tensor.requires_grad:
        return _Link(tensor, required=False, node=None, hooks=())
    node = tensor.grad_fn
    hooks = () if node is None else _node_hooks(node)
    return _Link(tensor, required=True, node=node, hooks=hooks, own=len(tensor._backward_hooks or ()))  # noqa: SLF001


def _node_hooks(node: Any) -> tuple[Mapping[Any, Any], ...]:
    """The hooks of a node, which torch shows to whoever has hung one there."""
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
    """Somebody wrote to what was only shown. Everything that follows would be of other numbers than its name says."""


class WeightEditError(EditError):
    """Somebody wrote to the policy's weights, so that a checkpoint of them would keep what was done."""


class EditWatch:
    """Names whoever edits the fields of a value that is shown to one after the other.

    On the CPU whoever did it is refused at once, on an accelerator in :meth:`close`, where it is waited for once, or
    at the end of :func:`comparing_later`.

    Args:
        fields: gives the tensors with their names, as they are when it is called.
        subject: what they are fields of.

    Attributes:
        gradients: of the tensors, as they were in the beginning.
    """

    def __init__(self, fields: Callable[[], Fields], subject: object = None) -> None:
        self.subject, self._fields = subject, fields
        shown = fields()
        self._last, self.gradients = Seal.of(shown), GradientSeal(shown)
        self._waiting: list[Suspicion] = []

    def after(self, who: str, cure: str) -> None:
        """Compares with the last time.

        Args:
            who: was shown the value since.
            cure: what it should do instead.

        Raises:
            EditError: naming who, and what was edited.
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
        """Compares what is still to be compared.

        Raises:
            EditError: naming who was the first, and what was edited.
        """
        waiting, self._waiting = self._waiting, []
        later = _later.get()
        if later is None:
            _refuse_first(waiting)
        else:
            later.extend(waiting)


class Suspicion(NamedTuple):
    """Somebody was shown something, and whether it was edited is known once an accelerator has come to it."""

    who: str
    cure: str
    comparison: Comparison


_later: ContextVar[list[Suspicion] | None] = ContextVar("later", default=None)


@contextmanager
def comparing_later() -> Iterator[None]:
    """Whatever watches inside have to wait for an accelerator for is compared at the end, in one wait.

    Raises:
        EditError: naming who was the first, and what was edited.
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
    """Raises if there are edits.

    Raises:
        EditError: naming who, and what was edited.
    """
    if names := ", ".join(fields):
        raise EditError(f"{who} wrote in place to {names}: {cure}")


def refuse_grad_mode(who: str, *, enabled: bool) -> None:
    """Raises if gradients are switched on or off otherwise than they were, and switches them back.

    Raises:
        EditError: naming who.
    """
    if torch.is_grad_enabled() != enabled:
        torch.set_grad_enabled(enabled)
        raise EditError(
            f"{who} left gradients switched {'off' if enabled else 'on'} for everybody after it: write `with "
            "torch.no_grad():` around its own lines alone"
        )


def copy_plain(value: Any) -> Any:
    """A copy of lists, dicts, tuples, sets, arrays and tensors, however deep; anything else is shared.

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
    """Whether a value is still what :func:`copy_plain` copied; what that shares is compared by identity."""
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
    """The keys of a dict whose values are not what they were."""
    return [key for key in {**before, **after} if not same_plain(before.get(key), after.get(key))]
