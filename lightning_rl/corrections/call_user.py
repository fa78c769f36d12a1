"""Calls of user code of the signal: contributions, observers, losses, reductions and estimators."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from lightning_rl.utils.mutation_guard import Fields, Versions, refuse_edits
from lightning_rl.utils.stop_iteration import stop_error
from lightning_rl.utils.torch_state import preserve_torch_state

ReturnT = TypeVar("ReturnT")
PURE = "return a new tensor and modify nothing in place (use x * y, not x *= y; no .data, .numpy() or set_)"


class Guard(Protocol):
    """Detection of what user code must not do to the tensors that it is shown."""

    def around(self, who: str, shown: Callable[[], Fields], args: Sequence[object]) -> AbstractContextManager[object]:
        """Return a context for a call of user code.

        Args:
            who: Name of the user code for messages.
            shown: Returns names and tensors of the arguments.
            args: Arguments of the call.

        Raises:
            EditError: At the end of the context, with the edited tensors.
        """
        ...


class VersionGuard:
    """Detects in-place edits by version counter and identity, at the cost of two lookups per tensor."""

    @contextmanager
    def around(self, who: str, shown: Callable[[], Fields], args: Sequence[object]) -> Iterator[None]:
        """Compare the tensors before and after a call."""
        del args
        before = Versions(shown())
        yield
        refuse_edits(who, before.changes(shown()), PURE)


VERSIONS = VersionGuard()


def call_user(
    who: str,
    function: Callable[..., ReturnT],
    *args: object,
    shown: Callable[[], Fields],
    guard: Guard = VERSIONS,
) -> ReturnT:
    """Call user code of the signal.

    Settings of torch that it changes, such as the gradient mode, are restored after the call.

    Args:
        who: Name of the user code for messages.
        function: Function to call.
        args: Its arguments.
        shown: Returns names and tensors of the arguments.
        guard: Detects edits of the arguments.

    Raises:
        EditError: If the function modified a tensor that it was shown.
        RuntimeError: If it raised StopIteration.
    """
    with guard.around(who, shown, args), preserve_torch_state():
        try:
            return function(*args)
        except StopIteration as stop:
            raise stop_error(stop) from stop
