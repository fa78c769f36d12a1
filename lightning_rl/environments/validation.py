"""Validation of environments, and of the messages and token ids that they return."""

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from lightning_rl.data.pictures import COLUMNS, column_pictures, is_picture
from lightning_rl.data.row_schema import content_cure, has_pictures, joined_parts
from lightning_rl.environments.environment import Environment, StepResult, TokenEnvironment, TokenStep
from lightning_rl.environments.tools import ObjectEnvironment, has_schema
from lightning_rl.samples import Message

REPLY_ROLES = ("user", "tool")
CONTEXT_ROLES = ("system", "developer", *REPLY_ROLES, "assistant")
EXAMPLE = '{"role": "user", "content": "..."}'


def environment_of(made: Any) -> Environment | TokenEnvironment:
    """Return the object of a factory as an environment, wrapped if it has the methods that TRL expects.

    Raises:
        ValueError: If it fits no kind; names the class and what is missing.
    """
    name = type(made).__name__
    if isinstance(made, Environment):
        if type(made).step is Environment.step:
            raise ValueError(f"expected {name} to define step: write def step(self, answer) -> StepResult")
        return made
    step = getattr(made, "step", None)
    if isinstance(made, TokenEnvironment) and _takes(made.step, 2) and (_takes(made.reset, 2) or not has_schema(step)):
        return made
    if callable(step) and not has_schema(step):
        raise ValueError(
            f"expected {name}, which has step{_signature(step)}, to be an Environment with step(answer), or to "
            f"have reset(row, seed), step(token_ids, finish) and close(): write class {name}(Environment), "
            "with Environment of lightning_rl.environments, or give step a hint and a line under Args: if it is a tool"
        )
    return ObjectEnvironment(made)


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Return True if a function can be called with this number of arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})"


def check_reset(environment: Environment | TokenEnvironment, prompt: Any, vocabulary: int | None = None) -> Any:
    """Return the messages or token ids from an environment's ``reset`` after checking them.

    Raises:
        TypeError: If the type is wrong; names the environment.
        ValueError: If a message is invalid, or an id is outside of the vocabulary; names it and the environment.
    """
    where = f"{name_of(environment)}.reset"
    if isinstance(environment, Environment):
        check_messages(prompt, where)
    else:
        _check_ids(prompt, where, vocabulary)
    return prompt


def check_step(environment: Environment | TokenEnvironment, step: Any, vocabulary: int | None = None) -> Any:
    """Return the :class:`StepResult` or :class:`TokenStep` of an environment after checking it.

    Raises:
        TypeError: If the type is wrong; names the environment.
        ValueError: As for :func:`check_reset`.
    """
    kind = StepResult if isinstance(environment, Environment) else TokenStep
    where = f"{name_of(environment)}.step"
    if not isinstance(step, kind):
        raise TypeError(f"expected {where} to return a {kind.__name__}, got {step!r:.200}")
    if isinstance(step, StepResult):
        check_messages(step.messages, where, REPLY_ROLES)
        check_messages(step.rewritten, where)
    else:
        _check_ids(step.token_ids, where, vocabulary)
        _check_ids(step.rewritten, where, vocabulary)
    return step


def check_messages(messages: Any, where: str, roles: Sequence[str] = CONTEXT_ROLES) -> None:
    """Check messages of an environment, a prompt or a rewritten context; ``where`` names their source in errors.

    Raises:
        TypeError: If the type of a message or its content is wrong.
        ValueError: If a role is invalid, or the last message is an answer.
    """
    _check_list(messages, "messages", where)
    for number, message in enumerate(messages):
        name = f"message {number} of {where}"
        if not isinstance(message, Mapping):
            raise TypeError(f"expected {name} to be a mapping such as {EXAMPLE}, got {message!r:.200}")
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            raise ValueError(f"expected {name} to have one of the roles {', '.join(roles)}, got {role!r:.200}")
        calls = role == "assistant" and message.get("tool_calls")
        beside = [key for key in COLUMNS if any(map(is_picture, column_pictures({key: message.get(key)})))]
        if beside:
            raise TypeError(
                f'expected the pictures of {name} as parts of its content, {{"type": "image", "image": ...}}, got some '
                f'in "{beside[0]}"'
            )
        fits = isinstance(joined_parts(content), str) or has_pictures(content)
        if not fits and not (content is None and calls):
            raise TypeError(
                f"expected {name} to have a text as content, as {EXAMPLE}, got {content!r:.200}: "
                + content_cure(content)
            )
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"expected messages of {where} that the policy is to answer, got an answer as the last one: leave it out"
        )


def _check_ids(ids: Any, where: str, vocabulary: int | None) -> None:
    """Check that all are token ids of the policy."""
    _check_list(ids, "token ids", where)
    for token in ids:
        if not isinstance(token, Integral):
            raise TypeError(f"expected a token id in what {where} returns, got {type(token).__name__} {token!r:.200}")
        if int(token) < 0 or (vocabulary is not None and int(token) >= vocabulary):
            known = "of at least 0" if vocabulary is None else f"in [0, {vocabulary}), the policy's vocabulary,"
            raise ValueError(f"expected token ids {known} in what {where} returns, got {int(token)}")


def _check_list(items: Any, kind: str, where: str) -> None:
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"expected {where} to return a list of {kind}, got {type(items).__name__} {items!r:.200}")


def name_of(environment: Any) -> str:
    """Return the name of an environment's class, inside of any wrapper, for errors."""
    inner = getattr(environment, "environment", environment)
    return str(getattr(inner, "environment_name", type(inner).__name__))


def copy_message(message: Message) -> dict[str, Any]:
    """Return a message without entries that are None, which templates would write, and with a text as content.

    Content of parts is kept if it has pictures.
    """
    text = joined_parts(message.get("content"))
    kept = {key: value for key, value in message.items() if value is not None}
    return {"content": "", **kept, **({} if text is None else {"content": text})}


def plain(value: Any) -> Any:
    """Convert a value to plain Python values, lists and dicts.

    Raises:
        TypeError: If it has a value that cannot be converted.
    """
    for form in (bool, int, float, str, bytes):  # also converts their subclasses
        if isinstance(value, form):
            return form(value)  # pyrefly: ignore[bad-argument-type]
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    if type(value).__module__.partition(".")[0] == "PIL":
        value.save(file := io.BytesIO(), "PNG")
        return file.getvalue()
    raise TypeError(f"expected plain values, lists and mappings from an environment, got {type(value).__name__}")
