"""Detection of the kind of environment from an object's class and methods."""

import inspect
from collections.abc import Callable
from typing import Any

from lightning_rl.environments.environment import Environment, TokenEnvironment
from lightning_rl.environments.tools import ObjectEnvironment, has_schema

METHODS = {"reset": ("row", "seed"), "step": ("answer",), "reward": (), "close": ()}
TOKEN_METHODS = {**METHODS, "step": ("token_ids", "finish")}


def environment_of(made: Any) -> Environment | TokenEnvironment:
    """Return the object of a factory as an environment, wrapped if it has the methods that TRL expects.

    Raises:
        ValueError: If it fits no kind; names the class and what is missing.
    """
    if isinstance(made, Environment):
        if type(made).step is Environment.step:
            raise ValueError(f"expected {_name(made)} to define step: write def step(self, answer) -> StepResult")
        _check_methods(made, METHODS)
        return made
    step = getattr(made, "step", None)
    if isinstance(made, TokenEnvironment) and _takes(made.step, 2) and (_takes(made.reset, 2) or not has_schema(step)):
        _check_methods(made, TOKEN_METHODS)
        return made
    if callable(step) and not has_schema(step):
        _refuse_step(made, step)
    return ObjectEnvironment(made)


def _refuse_step(made: Any, step: Callable[..., Any]) -> None:
    """Raise for an object whose ``step`` is no tool.

    Raises:
        ValueError: With the class and what to write.
    """
    name = _name(made)
    if _takes(step, 1):
        raise ValueError(
            f"expected {name}, which has step(answer), to be an Environment: write class {name}(Environment), with "
            "Environment of lightning_rl.environments, or give step a hint and a line under Args: if it is a tool"
        )
    lacking = next((method for method in ("reset", "close") if not callable(getattr(made, method, None))), None)
    if _takes(step, 2) and lacking:
        raise ValueError(
            f"expected {name}, which has step(token_ids, finish), to be a TokenEnvironment, got one without {lacking}: "
            f"write def {lacking}(self{'' if lacking == 'close' else ', row, seed'})"
        )
    raise ValueError(
        f"expected {name} to have step(self, answer) of an Environment or step(self, token_ids, finish) of a "
        f"TokenEnvironment, got step{_signature(step)}"
    )


def _check_methods(environment: Any, methods: dict[str, tuple[str, ...]]) -> None:
    """Check that methods can be called as conversations do, and are not coroutines or generators.

    Raises:
        ValueError: If not; names class and method, and what to write.
    """
    for method, names in methods.items():
        function = getattr(environment, method, None)
        if function is None:
            continue  # reward is optional
        where, form = f"{_name(environment)}.{method}", f"def {method}(self{''.join(f', {name}' for name in names)})"
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError(
                f"expected {where} to be a plain function, got one that is async: write {form}, and "
                "asyncio.run(...) around what has to be awaited"
            )
        if inspect.isgeneratorfunction(function):
            raise ValueError(f"expected {where} to return, got a function that yields: write {form} with return")
        if not _takes(function, len(names)):
            raise ValueError(
                f"expected {where} to be called with {', '.join(names) or 'nothing'}, got {method}"
                f"{_signature(function)}: write {form}"
            )


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Return True if a function can be called with this number of arguments, or has no signature."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # a C function
        return True
    return True


def _signature(function: Callable[..., Any]) -> str:
    return f"({', '.join(map(str, inspect.signature(function).parameters))})"


def _name(made: Any) -> str:
    return type(made).__name__
