"""Validation of messages and token ids from environments, and of prompts in messages."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from lightning_rl.environments.environment import Environment, Message, StepResult, TokenEnvironment, TokenStep

ROLES = ("user", "tool")
"""Roles of replies."""

SPEAKERS = ("system", "developer", *ROLES, "assistant")
"""Roles in a prompt or a rewritten context."""

TEXTS = ("name", "tool_call_id", "reasoning_content")  # entries that templates write verbatim
EXAMPLE = '{"role": "user", "content": "..."}'


def check_reset(environment: Environment | TokenEnvironment, said: Any, vocabulary: int | None = None) -> Sequence[Any]:
    """Return the messages or token ids from an environment's ``reset`` after checking them.

    Args:
        environment: Environment that returned them.
        said: Return value of its ``reset``.
        vocabulary: Number of token ids of the policy; None for no check.

    Raises:
        TypeError: If the type is wrong; names the environment.
        ValueError: If a message or an id is invalid; names it and the environment.
    """
    where = f"{name_of(environment)}.reset"
    if isinstance(environment, Environment):
        check_context(_list_of("messages", said, where), where)
    else:
        check_ids(_list_of("token ids", said, where), where, vocabulary)
    return said


def check_step(environment: Environment | TokenEnvironment, said: Any, vocabulary: int | None = None) -> Any:
    """Return the :class:`StepResult` or :class:`TokenStep` of an environment after checking it.

    Args:
        environment: Environment that returned it.
        said: Return value of its ``step``.
        vocabulary: Number of token ids of the policy; None for no check.

    Raises:
        TypeError: If the type is wrong; names the environment.
        ValueError: If a message or an id is invalid; names it and the environment.
    """
    kind, where = (
        StepResult if isinstance(environment, Environment) else TokenStep,
        f"{name_of(environment)}.step",
    )
    if not isinstance(said, kind):
        raise TypeError(f"expected {where} to return a {kind.__name__}, got {said!r:.200}")
    if isinstance(said, StepResult):
        for number, message in enumerate(_list_of("messages", said.messages, where)):
            _check_message(message, f"message {number} of {where}", ROLES)
        check_context(_list_of("messages", said.rewritten, where), where)
        return said
    check_ids(_list_of("token ids", said.token_ids, where), where, vocabulary)
    check_ids(_list_of("token ids", said.rewritten, where), where, vocabulary)
    for message in said.messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"expected a mapping for each message of {where}, got {message!r:.200}")
    return said


def check_context(messages: Sequence[Any], where: str) -> None:
    """Check the messages of a prompt or a rewritten context.

    Args:
        messages: All messages.
        where: Name of their source in errors.

    Raises:
        TypeError: If the type of a message or an entry is wrong.
        ValueError: If a role or a text is invalid, or the last message is an answer.
    """
    for number, message in enumerate(messages):
        _check_message(message, f"message {number} of {where}", SPEAKERS)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"expected messages of {where} that the policy is to answer, got an answer as the last one: leave it out"
        )


def check_ids(ids: Sequence[Any], where: str, vocabulary: int | None = None) -> None:
    """Check token ids.

    Args:
        ids: Ids for the policy.
        where: Name of their source in errors.
        vocabulary: Number of token ids of the policy; None if unknown.

    Raises:
        TypeError: If an id is no integer.
        ValueError: If an id is outside of the vocabulary.
    """
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise TypeError(f"expected a token id in what {where} returns, got {type(token).__name__} {token!r:.200}")
    outside = [token for token in ids if int(token) < 0 or (vocabulary is not None and int(token) >= vocabulary)]
    if outside:
        known = "of at least 0" if vocabulary is None else f"in [0, {vocabulary}), the policy's vocabulary,"
        raise ValueError(f"expected token ids {known} in what {where} returns, got {int(outside[0])}")


def name_of(environment: Any) -> str:
    """Return the name of an environment's own class, inside of any wrapper, for errors."""
    spoken_for = getattr(environment, "environment", environment)
    return str(getattr(spoken_for, "environment_name", type(spoken_for).__name__))


def copy_message(message: Message) -> dict[str, Any]:
    """Return a message without entries that are None, which templates would write, and with a text as content."""
    return {"content": "", **{key: value for key, value in message.items() if value is not None}}


def plain(value: Any) -> Any:
    """Convert a value to plain Python values, lists and dicts.

    Raises:
        TypeError: If it has a value that cannot be converted.
    """
    forms: tuple[Any, ...] = (bool, int, float, str, bytes)  # also converts their subclasses
    for form in forms:
        if isinstance(value, form):
            return form(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    raise TypeError(f"expected plain values, lists and mappings from an environment, got {type(value).__name__}")


def strings_of(value: Any) -> Iterator[str]:
    """Yield all strings in nested values, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from strings_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from strings_of(part)


def _list_of(several: str, items: Any, where: str) -> Sequence[Any]:
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"expected {where} to return a list of {several}, got {type(items).__name__} {items!r:.200}")
    return items


def _check_message(message: Any, where: str, roles: Sequence[str]) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"expected {where} to be a mapping such as {EXAMPLE}, got {type(message).__name__} {message!r:.200}"
        )
    role, content = message.get("role"), message.get("content")
    if role not in roles:
        raise ValueError(f"expected {where} to have one of the roles {', '.join(roles)}, got {role!r:.200}")
    calls = message.get("tool_calls") if role == "assistant" else None
    if not isinstance(content, str) and not (content is None and calls):
        raise TypeError(
            f"expected {where} to have a text as content, as {EXAMPLE}, got {content!r:.200}: images and other parts "
            "are not supported; join parts of text, and write other values as text"
        )
    if calls is not None and not (isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls)):
        raise TypeError(f"expected {where} to have a list of mappings as tool_calls, got {calls!r:.200}")
    for key in TEXTS:
        if not isinstance(message.get(key), (str, type(None))):
            raise TypeError(f"expected {where} to have a text as {key}, got {message[key]!r:.200}")
    for text in strings_of(message):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(
                f"expected text of whole characters in {where}, got half a surrogate pair in {text!r:.200}: write "
                'text.encode("utf-8", "replace").decode()'
            )
