"""ValueGuard: detects every edit of what user code is shown, and hooks on its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.corrections.call_user import PURE, VERSIONS
from lightning_rl.testing.properties.comparisons import bitwise_equal
from lightning_rl.utils.mutation_guard import EditError, Fields, Versions, refuse_edits

KEPT = "code that kept the view until the backward, such as a callback with on_before_backward,"


class ValueGuard:
    """Detects edits by any means on audited rollouts, and by version counter and identity on others.

    Copies of the values detect edits through ``.data``, ``.numpy()`` and pointers.

    Attributes:
        active: True if the current rollout is audited.
    """

    active = True
    _seal: "Seal | None" = None
    _view: LossView | None = None
    _gradients: "GradientSeal | None" = None

    def before_call(self, who: str, args: Sequence[object]) -> None:
        """Record further state before a call of user code."""

    def after_call(self, who: str) -> None:
        """Compare further state after a call of user code."""

    @contextmanager
    def around(self, who: str, shown: Callable[[], Fields], args: Sequence[object]) -> Iterator[None]:
        """Compare the tensors, and further state, before and after a call."""
        if not self.active:
            with VERSIONS.around(who, shown, args):
                yield
            return
        self.before_call(who, args)
        fields = shown()
        if self._seal is None or self._seal.versions.changes(fields):  # else the call before was shown the same
            self._seal = Seal(fields)
        before, gradients = self._seal, GradientSeal(fields)
        if args and isinstance(args[0], LossView) and args[0] is not self._view:
            self._view, self._gradients = args[0], gradients
        yield
        refuse_edits(who, before.changes(shown()), PURE)
        gradients.refuse(who, PURE)
        self.after_call(who)

    def end_backward(self) -> None:
        """Check the gradients of the microbatch whose backward has ended.

        Raises:
            EditError: If a hook was added to the gradient of its view since the loss was computed.
        """
        gradients, self._view, self._gradients, self._seal = self._gradients, None, None, None
        if gradients is not None:
            gradients.refuse(KEPT, "do not keep a view")


class Seal:
    """Versions and copies of tensors, to detect that one was written to by any means.

    Args:
        fields: Names and tensors; a tensor with two names is copied once.
    """

    def __init__(self, fields: Fields) -> None:
        copies = {id(tensor): tensor.detach().clone() for tensor in {id(one): one for _, one in fields}.values()}
        self.versions, self._fields, self._copies = Versions(fields), fields, copies

    def changes(self, fields: Fields) -> list[str]:
        """Return the names of fields that were written, replaced, added or removed since."""
        edited = {name for name, tensor in self._fields if not bitwise_equal(self._copies[id(tensor)], tensor.detach())}
        edited.update(self.versions.changes(fields))
        return [name for name in dict.fromkeys(name for name, _ in [*self._fields, *fields]) if name in edited]


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

    A hook can replace the gradient of the whole loss without a change of any value.
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
