"""ChecksumGuard: detects every edit of what user code is shown, and hooks on its gradients."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.corrections.call_user import PURE, VERSIONS
from lightning_rl.utils.mutation_guard import EditError, Fields, Versions, refuse_edits

WORD = 8  # bytes
MIXER = -7046029254386353131  # odd, half of its bits set: 2**64 over the golden ratio, as a signed number
NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size, for dtypes numpy lacks
KEPT = "code that kept the view until the backward, such as a callback with on_before_backward,"


class Watch(Protocol):
    """Further comparisons around user code on audited rollouts."""

    @property
    def active(self) -> bool:
        """True if the current rollout is audited."""
        ...

    def before_call(self, who: str, args: Sequence[object]) -> None:
        """Record state before a call of user code."""
        ...

    def after_call(self, who: str, args: Sequence[object]) -> None:
        """Compare state after a call of user code."""
        ...


class ChecksumGuard:
    """Detects edits by any means on audited rollouts, and by version counter and identity on others.

    Checksums of the bytes detect edits through ``.data``, ``.numpy()`` and pointers.

    Args:
        watch: Further comparisons.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._view: LossView | None = None
        self._gradients: GradientSeal | None = None

    @contextmanager
    def around(self, who: str, shown: Callable[[], Fields], args: Sequence[object]) -> Iterator[None]:
        """Compare the tensors, and the state that the watch compares, before and after a call."""
        if not self._watch.active:
            with VERSIONS.around(who, shown, args):
                yield
            return
        self._watch.before_call(who, args)
        fields = shown()
        before, gradients = Seal(fields), GradientSeal(fields)
        if args and isinstance(args[0], LossView) and args[0] is not self._view:
            self._view, self._gradients = args[0], gradients
        yield
        gradients.refuse(who, PURE)
        refuse_edits(who, before.changes(shown()), PURE)
        self._watch.after_call(who, args)

    def end_backward(self) -> None:
        """Check the gradients of the microbatch whose backward has ended.

        Raises:
            EditError: If a hook was added to the gradient of its view since the loss was computed.
        """
        gradients, self._view, self._gradients = self._gradients, None, None
        if gradients is not None:
            gradients.refuse(KEPT, "do not keep a view")


class Seal:
    """Versions, shapes and checksums of tensors, to detect that one was written to by any means.

    Args:
        fields: Names and tensors; a tensor with two names is read once.
    """

    def __init__(self, fields: Fields) -> None:
        self._versions, self._sums = Versions(fields), _sums_by_name(fields)

    def changes(self, fields: Fields) -> list[str]:
        """Return the names of fields that were written, replaced, added or removed since."""
        edited, sums = set(self._versions.changes(fields)), _sums_by_name(fields)
        names = {**self._sums, **sums}
        return [name for name in names if name in edited or self._sums.get(name) != sums.get(name)]


def _sums_by_name(fields: Fields) -> dict[str, tuple[Any, ...]]:
    """Return form and checksum of each tensor; waits for an accelerator once per device."""
    sums, elsewhere = dict[int, int](), dict[torch.device, dict[int, Tensor]]()
    for _, tensor in fields:
        if id(tensor) in sums:
            continue
        if tensor.is_cpu:
            sums[id(tensor)] = checksum(tensor)
        else:
            elsewhere.setdefault(tensor.device, {})[id(tensor)] = tensor
    for tensors in elsewhere.values():
        sums |= dict(zip(tensors, device_checksums(list(tensors.values())).tolist(), strict=True))
    return {name: (tensor.shape, tensor.stride(), sums[id(tensor)]) for name, tensor in fields}


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the elements of a CPU tensor; detects every change of up to 32 neighboring bits.

    Example:
        >>> rewards = torch.tensor([1.0, 0.0])
        >>> before = checksum(rewards)
        >>> rewards.numpy()[0] = 2.0
        >>> checksum(rewards) == before
        False
    """
    tensor = tensor.detach().contiguous()
    try:
        buffer = tensor.numpy()
    except TypeError:  # bfloat16 and other dtypes that numpy lacks
        buffer = tensor.view(NUMBERS[tensor.element_size()]).numpy()
    return zlib.crc32(cast(Any, buffer))


def device_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each of N tensors of one device, [N] int64, in a few kernels and without synchronization.

    The bytes are read as 64-bit words x_i. The checksum is the sum of w_i mix(x_i) modulo 2^64 with odd weights w_i
    that depend on the position i, so it detects a change of any single word and of the order.
    """
    pieces, ends, number = list[Tensor](), list[int](), 0
    for tensor in tensors:
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
