"""Token ids of a program's calls, in which the policy's answers keep the ids that were sampled."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_rl.environments.chat_template import Bridge, BridgeError
from lightning_rl.environments.environment import Action
from lightning_rl.environments.gateway.calls import Call
from lightning_rl.environments.messages import message_of
from lightning_rl.samples import Message


@dataclass(frozen=True, slots=True)
class Given:
    """Answer that a program got: context of 30 ids, answer of 12 ids."""

    prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts of one sample's calls.

    An assistant's message that equals an answer of the policy is replaced by its sampled ids, so a history that goes on
    continues the ids of its calls. All other messages, edited answers too, are written by the chat template.

    Args:
        bridge: Chat template.
    """

    bridge: Bridge
    _given: dict[str, list[Given]] = field(init=False, default_factory=dict)

    def prefix(self, call: Call) -> tuple[tuple[int, ...], int]:
        """Return the token ids that a call continues, and the number of sampled ones among them.

        Raises:
            BridgeError: If the chat template does not write the messages or drops a part of them; says why.
        """
        messages, tools = call.messages, call.tools
        known = [place for place, message in enumerate(messages) if key_of(message) in self._given]
        if known:
            try:
                return self._around(messages, known, tools)
            except BridgeError:
                pass  # messages that only a whole conversation has, such as an edited answer
        return self._render(messages, tools), 0

    def _around(
        self, messages: Sequence[Message], known: Sequence[int], tools: Sequence[Message]
    ) -> tuple[tuple[int, ...], int]:
        """Return the ids of messages around the answers at the places ``known``."""
        ids, answer, begin, sampled = (), (), 0, 0
        for place in (*known, len(messages)):
            new = messages[begin:place]
            ids = (*ids, *answer, *self.bridge.after(answer, new)) if begin else self._render(new, tools)
            if place < len(messages):
                answer = self._choose(key_of(messages[place]), ids)
                sampled += len(answer)
            begin = place + 1
        return ids, sampled

    def _choose(self, key: str, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids of an answer, of the newest that was given in this context if there is one."""
        given = self._given[key]
        here = [each.token_ids for each in given if each.prefix_ids == prefix]
        return here[-1] if here else min(each.token_ids for each in given)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids that the template writes; reasoning of earlier turns is left to the template."""
        self.bridge.check_parts([without_reasoning(message) for message in messages], tools)
        return tuple(self.bridge.render(messages, tools))

    def add(self, prefix_ids: tuple[int, ...], answer: Action) -> None:
        """Store an answer, with the ids of its tool calls, that the program gets."""
        given = Given(prefix_ids, answer.token_ids)
        self._given.setdefault(key_of(message_of(answer)), []).append(given)


def key_of(message: Message) -> str:
    """Return a text that is equal for equal messages of the policy; empty for other messages."""
    if message.get("role") != "assistant":
        return ""
    calls = [(_function(call), call.get("id")) for call in message.get("tool_calls") or ()]
    parts = [message.get("content") or "", message.get("reasoning_content") or "", calls]
    return json.dumps(parts, sort_keys=True)


def _function(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    return function.get("name"), function.get("arguments")


def without_reasoning(message: Message) -> Message:
    """Return a message without reasoning, which templates write for some turns only."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def with_call_ids(answer: Action, prefix_ids: Sequence[int]) -> Action:
    """Return an answer whose tool calls have ids, made from the tokens if the policy wrote none."""
    digest = hashlib.blake2b(repr((tuple(prefix_ids), answer.token_ids)).encode(), digest_size=3).hexdigest()
    calls = [replace(call, id=call.id or f"{digest}{number:03d}") for number, call in enumerate(answer.tool_calls)]
    return replace(answer, tool_calls=calls)
