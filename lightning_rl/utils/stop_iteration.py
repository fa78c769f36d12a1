"""StopIteration of user code, which a loop of Lightning would take for the end of the data."""

from collections.abc import Callable
from functools import wraps
from traceback import walk_tb
from typing import Any, TypeVar, cast

HookT = TypeVar("HookT", bound=Callable[..., Any])


def stop_error(stop: StopIteration) -> RuntimeError:
    """Return the error to raise for a StopIteration, with the function that raised it."""
    code = list(walk_tb(stop.__traceback__))[-1][0].f_code
    return RuntimeError(
        f"expected no StopIteration to leave {code.co_qualname} ({code.co_filename}, line {code.co_firstlineno}), got "
        "one, which Lightning takes for the end of the data: catch it there, or pass a default to next()"
    )


def refuse_stop_iteration(hook: HookT) -> HookT:
    """Decorate a hook of Lightning so that it raises a RuntimeError for a StopIteration of user code inside."""

    @wraps(hook)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        try:
            return hook(*arguments, **keywords)
        except StopIteration as stop:
            raise stop_error(stop) from stop

    return cast(HookT, wrapper)
