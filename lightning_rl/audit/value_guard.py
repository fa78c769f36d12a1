"""ValueGuard: detects every edit of what user code is shown, and hooks on its gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.audit.audit_error import bitwise_equal
from lightning_rl.corrections.call_user import PURE, VERSIONS
from lightning_rl.utils.mutation_guard import EditError, Fields, Versions, refuse_edits


class ValueGuard:
    """Detects edits by any means on audited rollouts, and by version counter and identity on others.

    Copies of the values detect edits through ``.data``, ``.numpy()`` and pointers. A hook can replace the gradient of
    the whole loss without a change of any value; ``retain_grad`` only keeps a copy and is allowed.

    Attributes:
        active: True if the current rollout is audited.
    """

    active = True

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
        before, links = Seal(fields), _autograd_links(fields)
        yield
        refuse_edits(who, before.changes(shown()), PURE)
        if names := " and of ".join(name for name, link in _autograd_links(fields).items() if link != links[name]):
            raise EditError(
                f"{who} registered a hook on the gradient of {names}, or detached it, which changes the gradient of "
                f"the whole loss: {PURE}"
            )
        self.after_call(who)


class Seal:
    """Versions and copies of tensors, to detect that one was written to by any means.

    Args:
        fields: Names and tensors; a tensor with two names is copied once.
    """

    def __init__(self, fields: Fields) -> None:
        copies = {id(tensor): tensor.detach().clone() for tensor in {id(one): one for _, one in fields}.values()}
        self._versions, self._fields, self._copies = Versions(fields), fields, copies

    def changes(self, fields: Fields) -> list[str]:
        """Return the names of fields that were written, replaced, added or removed since."""
        edited = {name for name, tensor in self._fields if not bitwise_equal(self._copies[id(tensor)], tensor.detach())}
        edited.update(self._versions.changes(fields))
        return [name for name in dict.fromkeys(name for name, _ in [*self._fields, *fields]) if name in edited]


def _autograd_links(fields: Fields) -> dict[str, tuple[Any, ...]]:
    """Return for each tensor its node in the autograd graph and its number of hooks."""
    return {name: (one.requires_grad, one.grad_fn, len(one._backward_hooks or ())) for name, one in fields}  # noqa: SLF001
