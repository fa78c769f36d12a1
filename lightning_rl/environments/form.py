"""Form: what an environment says is a list of messages that a chat template can write, or of ids that a policy reads.

The same holds of messages that begin a conversation, come back, stand in a rewritten context, or are the row's prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from lightning_rl.environments.environment import Environment, Message, Step, TokenEnvironment, TokenStep

ROLES = ("user", "tool")
"""Who may answer a policy."""

SPEAKERS = ("system", "developer", *ROLES, "assistant")
"""Who may speak in what a policy reads from the beginning."""

TEXTS = ("name", "tool_call_id", "reasoning_content")  # entries that a template writes as they are
EXAMPLE = '{"role": "user", "content": "..."}'


def check_reset(environment: Environment | TokenEnvironment, said: Any, vocabulary: int | None = None) -> Sequence[Any]:
    """What an environment begins with: messages, or token ids.

    Args:
        environment: that says it.
        said: by its ``reset``.
        vocabulary: how many token ids the policy knows; None for no check.

    Raises:
        TypeError: naming the environment, and what it begins with instead.
        ValueError: naming the environment, and the message or the id that is none.
    """
    where = f"{name_of(environment)}.reset"
    if isinstance(environment, Environment):
        check_context(_list_of("messages", said, where), where)
    else:
        check_ids(_list_of("token ids", said, where), where, vocabulary)
    return said


def check_step(environment: Environment | TokenEnvironment, said: Any, vocabulary: int | None = None) -> Any:
    """What an environment says to an answer: a :class:`Step` of messages, or a :class:`TokenStep` of token ids.

    Args:
        environment: that says it.
        said: by its ``step``.
        vocabulary: how many token ids the policy knows; None for no check.

    Raises:
        TypeError: naming the environment, and what it says instead.
        ValueError: naming the environment, and the message or the id that is none.
    """
    kind, where = (
        Step if isinstance(environment, Environment) else TokenStep,
        f"{name_of(environment)}.step",
    )
    if not isinstance(said, kind):
        raise TypeError(f"expected {where} to return a {kind.__name__}, got {said!r:.200}")
    if isinstance(said, Step):
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
    """Refuses what no policy can be asked to answer: the beginning of a conversation, or a rewritten context.

    Args:
        messages: all that it reads.
        where: what errors call their source.

    Raises:
        TypeError: naming the message, and what it is or lacks.
        ValueError: if nobody known speaks, a text cannot be written, or the policy's answer is there already.
    """
    for number, message in enumerate(messages):
        _check_message(message, f"message {number} of {where}", SPEAKERS)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"expected messages of {where} that the policy is to answer, got an answer as the last one: leave it out"
        )


def check_ids(ids: Sequence[Any], where: str, vocabulary: int | None = None) -> None:
    """Refuses what is no token id of the policy.

    Args:
        ids: what the policy is to read.
        where: what errors call their source.
        vocabulary: how many ids it knows; None if unknown.

    Raises:
        TypeError: naming what is no whole number.
        ValueError: naming the id that lies outside, and the size of the vocabulary.
    """
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise TypeError(f"expected a token id in what {where} returns, got {type(token).__name__} {token!r:.200}")
    outside = [token for token in ids if int(token) < 0 or (vocabulary is not None and int(token) >= vocabulary)]
    if outside:
        known = "of at least 0" if vocabulary is None else f"in [0, {vocabulary}), the policy's vocabulary,"
        raise ValueError(f"expected token ids {known} in what {where} returns, got {int(outside[0])}")


def name_of(environment: Any) -> str:
    """What errors call an environment: its own class, whatever speaks for it in token ids or from its process."""
    spoken_for = getattr(environment, "environment", environment)
    return str(getattr(spoken_for, "environment_name", type(spoken_for).__name__))


def copy_message(message: Message) -> dict[str, Any]:
    """A message without the entries that are None, which templates would write as that word; content is a text."""
    return {"content": "", **{key: value for key, value in message.items() if value is not None}}


def plain(value: Any) -> Any:
    """A value as plain Python values, lists and dicts.

    Raises:
        TypeError: naming what has no such form.
    """
    forms: tuple[Any, ...] = (bool, int, float, str, bytes)  # subclasses of theirs become theirs
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
    """All strings of nested values, keys aside."""
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
