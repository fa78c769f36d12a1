"""Bridge: tokens between two answers of a policy, without rendering the answers again.

A chat template writes the same after every answer. So a dummy conversation with a marked answer is rendered, and its
ids from the end of that answer on are the bridge. Then prefix, sampled ids and bridge are concatenated, and no sampled
token is ever encoded again.
"""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.data.dropped_parts import dropped_parts, moved_parts
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_unicode
from lightning_rl.utils.chat_rendering import apply_template
from lightning_rl.utils.template_date import TODAY

MARK = "mark-of-an-answer-7f3a"
KINDS: dict[str, tuple[str, ...]] = {"user": ("user",), "tool": ("tool",), "two tools": ("tool", "tool")}
WORDS = ("first-thing-said 41", "second-thing-said 52")  # texts that no template writes
SYSTEM: Sequence[Message] = ({"role": "system", "content": "?"},)
MAX_CHARACTERS = 2**22  # of messages together: more fits into no context and takes minutes to encode
LATE = ": return it as a message of the role user, or rewrite the context with StepResult(rewritten=[...])"
CALL_ID = "call{:05d}"  # nine characters, as Mistral requires


class BridgeError(ValueError):
    """Chat template without a fixed text between two answers."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Text that a tokenizer's chat template writes between answers.

    Args:
        tokenizer: Tokenizer with a chat template.
        close: Ids that end a response of the run.
        options: Further arguments of the template, as for the prompts.

    Raises:
        BridgeError: If there is no template or no id ends an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    close: Collection[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    _control: Mapping[int, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    _checked: set[Any] = field(init=False, repr=False, compare=False, default_factory=set)

    def __post_init__(self) -> None:
        """Check that there are a template and closing ids."""
        if not self.tokenizer.chat_template:
            raise BridgeError("expected a tokenizer with a chat template for an environment in messages, got none")
        if not self.close:
            raise BridgeError(
                "expected ids that end an answer, got none: pass sampling=SamplingParams(eos_token_ids=[...]) with the "
                "token that the chat template writes after an answer"
            )
        object.__setattr__(self, "_control", control_tokens(self.tokenizer))

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the prompt of a conversation with schemas of tools; no text of messages becomes a control token.

        Raises:
            BridgeError: If the template does not render them or drops a part of them; says why.
        """
        self.check_parts(messages, tools)
        return self.render(messages, tools)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the ids of :meth:`encode`, without its check."""
        return self._ids(messages, tools=list(tools) or None)

    def check_parts(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> None:
        """Check that the template writes the texts and calls of messages and the names of tools, where they stand.

        Raises:
            BridgeError: If it drops a part, or writes a system message again after an answer; names the part.
        """
        _refuse(dropped_parts(self._text, messages, tools))
        _refuse_early(moved_parts(self._text, messages))
        if any(message.get("role") == "system" for message in messages):
            self._check_system()

    def _check_system(self) -> None:
        """Check that the template does not write a system message after an answer, as that of Mistral 7B v0.3 does."""
        if "system" in self._checked:
            return
        new: list[Message] = [{"role": "user", "content": WORDS[0]}]
        try:
            moved = self.tail(new, SYSTEM) != self.tail(new)
        except BridgeError:
            moved = False  # a template may reject system messages
        if moved:
            raise BridgeError(
                "the template writes a system message after an answer, where the policy has read it before: put its "
                "text into the first user message, or set a tokenizer.chat_template that writes it once"
            )
        self._checked.add("system")

    def _check_new(self, messages: Sequence[Message]) -> None:
        """Check that the template writes messages after an answer, once for messages of the same roles."""
        roles = tuple(message.get("role") for message in messages)
        if roles in self._checked:
            return
        for opening, new in dummies(messages):
            try:
                self._cut(opening, new)
            except BridgeError:
                continue
            _refuse(dropped_parts(self._text, new, before=opening))
            _refuse_early(dropped_parts(self._text_after_answer, new, before=opening))
            self._checked.add(roles)
            return

    def _check_names(self, messages: Sequence[Message]) -> None:
        """Check that the template does not write the name of a tool that a message lacks."""
        unnamed = [message for message in messages if message.get("role") == "tool" and not message.get("name")]
        if not unnamed or "names" in self._checked:
            return
        if len({self.tail([{**message, "name": name} for message in unnamed]) for name in WORDS}) > 1:
            raise BridgeError(
                "expected messages of the role tool with a name, because the template writes its name, got one without "
                'a name or a call that it answers: return {"role": "tool", "name": ..., "content": ...}'
            )
        self._checked.add("names")

    def _dropped_messages(self, messages: Sequence[Message]) -> list[str]:
        """Return the texts that the template does not write after an answer; the tokenizer may not know them."""
        for opening, new in dummies(messages):
            with suppress(BridgeError):
                self._cut(opening, new)
                after = self._text([*opening, *new]).partition(MARK)[2]
                return [
                    f"the text of a {message['role']} message" for message in new if message["content"] not in after
                ]
        return []

    def after(self, drawn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids after an answer: its closing token unless it was sampled, messages of users or tools, and the
        next answer's header.

        Raises:
            BridgeError: If the template does not render them or drops a part of them, or their text became control
                tokens; says why.
        """
        try:
            self._check_names(messages)
            ids = self.tail(messages)
        except BridgeError as error:
            if any(message.get("role") == "system" for message in messages):
                raise BridgeError(f"{error}{LATE}") from error
            raise
        self._check_new(messages)
        harmless = self.tail([{**message, "content": _short_text(message.get("content"))} for message in messages])
        if self._count(ids) > self._count(harmless):
            raise BridgeError("the environment's text became control tokens, which could end its turn")
        closed = drawn and (drawn[-1] == ids[0] or (drawn[-1] in self.ends and not self.closes_as_head(ids)))
        return ids[1:] if closed else ids

    @property
    def ends(self) -> Collection[int]:
        """Ids that close an answer: control tokens, unless only plain tokens end responses."""
        return frozenset(self.close) & self._control.keys() or self.close

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token in self._control for token in ids)

    def closes_as_head(self, ids: Sequence[int]) -> bool:
        """Return True if the token that closes an answer also begins the next message, as a role marker may do."""
        special = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = next((place for place in range(1, len(ids)) if ids[place] in special), len(ids))
        return bool(str(self.tokenizer.decode(list(ids[1:end]))).strip())

    def tail(self, messages: Sequence[Message], history: Sequence[Message] = ()) -> tuple[int, ...]:
        """Return the ids from the token that closes an answer to the start of the next answer."""
        refused: list[str] = []
        for opening, new in dummies(messages):
            try:
                return self._cut([*history, *opening], new)
            except BridgeError as error:
                refused.append(str(error))
        raise BridgeError("; ".join(dict.fromkeys(refused)))

    def _cut(self, opening: Sequence[Message], new: Sequence[Message]) -> tuple[int, ...]:
        before, found, after = self._text([*opening, *new]).partition(MARK)
        if not found:
            raise BridgeError(
                "the template does not write the text of an answer: it has to write each message's content"
            )
        if MARK in after:
            raise BridgeError("the template writes an answer twice")
        ids, earlier = self._ids([*opening, *new]), self._ids_of(before)

        def behind(ends: Collection[int]) -> tuple[int, ...]:
            closing = sum(token in ends for token in earlier)
            places = [place for place, token in enumerate(ids) if token in ends]
            return tuple(ids[places[closing] :]) if len(places) > closing else ()

        return behind(self.ends) or behind([self._end_in_history(opening, after)])

    def _end_in_history(self, opening: Sequence[Message], after: str) -> int:
        """Return the id that closes an answer before ``after`` and ends no response, as ``<|end|>`` of gpt-oss.

        Raises:
            BridgeError: If the template closes the last answer of a conversation with an id that ends no response
                either; says what to pass.
        """
        start = f"the template ends an answer with none of the ids {sorted(self.close)} that end a response"
        end = str(self._render(opening, head=False, tokenize=False)).partition(MARK)[2]
        first, last = (next(filter(self._control.__contains__, self._ids_of(text)), None) for text in (after, end))
        if first is None:
            raise BridgeError(f"{start}, nor with another control token: it has to write one after each answer")
        last = first if last is None else last
        if last in self.ends:
            return first
        raise BridgeError(
            f"{start}, but with {self._control[last]!r} (id {last}): pass sampling=SamplingParams(eos_token_ids="
            f"{sorted({*self.close, last})})"
        )

    def _ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        return str(self._render(messages, tokenize=False, tools=list(tools) or None))

    def _text_after_answer(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        return self._text(messages, tools).partition(MARK)[2]

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the conversation as ids; no text of a message becomes a control token."""
        if (characters := sum(map(len, strings_of(messages)))) > MAX_CHARACTERS:
            raise BridgeError(f"expected messages of at most {MAX_CHARACTERS} characters, got {characters}")
        if SANITIZES:
            safe = {"tokenize": True, "return_dict": False, "sanitize_control_tokens": True}
            return list(self._render(messages, **safe, **options))
        texts = list(strings_of(messages))
        if token := next((token for token in self._control.values() if any(token in text for text in texts)), None):
            raise BridgeError(
                f"the environment's text holds the control token {token!r}, which this version of transformers cannot "
                "write as plain text: install transformers>=5.23"
            )
        text = self._render(messages, tokenize=False, **options)
        return self._ids_of(text)

    def _render(self, messages: Sequence[Message], *, head: bool = True, **options: Any) -> Any:
        try:
            return apply_template(
                self.tokenizer,
                with_callers(messages),
                add_generation_prompt=head,
                **TODAY.options(self.tokenizer, **{**self.options, **options}),
            )
        except Exception as error:  # a template may raise anything
            for text in strings_of([*messages, *(options.get("tools") or ())]):
                check_unicode(text)
            raise BridgeError(f"the template raises {type(error).__name__}: {error}") from error

    def check(self, kind: str) -> list[str]:
        """Return the faults of the bridge over messages of a kind of :data:`KINDS`; empty if it is reliable."""
        new = [{"role": role, "content": words, "name": "f"} for role, words in zip(KINDS[kind], WORDS, strict=False)]
        try:
            ids = self.tail(new)
        except BridgeError as error:
            return [str(error)]
        opening: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        found: list[str] = []
        with suppress(BridgeError):
            if self.tail(new, [*opening, *opening]) != ids:
                found.append("the template writes something else after a longer conversation")
        found += [f"the template drops {part}" for part in self._dropped_messages(new)]
        return list(dict.fromkeys(found))


def _refuse(lost: Sequence[str]) -> None:
    if lost:
        raise BridgeError(
            f"the template drops {', '.join(lost)}, so the policy would not read it: set a tokenizer.chat_template "
            "that writes it"
        )


def _refuse_early(moved: Sequence[str]) -> None:
    if moved:
        raise BridgeError(
            f"the template writes {', '.join(moved)} before the answer that it follows, where the policy would not "
            f"read it{LATE}"
        )


SANITIZES = "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens that only a template may write: special ones, and added ones in its text."""
    template = str(tokenizer.chat_template)
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if number != tokenizer.unk_token_id  # encoding of any text outside of the vocabulary
        and (token.special or (token.content in template and not token.content.isspace()))
    }


def dummies(messages: Sequence[Message]) -> list[tuple[list[Message], list[Message]]]:
    """Return dummy conversations up to a marked answer, and the following messages, to try in order.

    A tool's message first follows a real call, as some templates copy its name or id. Most templates write arguments
    as JSON, some expect JSON text. An id that the policy made up may be in no form that a template takes.
    """
    ask: Message = {"role": "user", "content": "?"}
    new = [dict(message) for message in messages]
    plain = ([ask, {"role": "assistant", "content": MARK}], list[Message](new))
    tools = [message for message in new if message.get("role") == "tool"]
    if not tools:
        return [plain]
    found: list[tuple[list[Message], list[Message]]] = []
    for own in (True, False) if any(message.get("tool_call_id") for message in tools) else (True,):
        for number, message in enumerate(tools):
            message["tool_call_id"] = (own and message.get("tool_call_id")) or CALL_ID.format(number)
        for written in (False, True):
            calls = [_call(message, "?" if number else MARK, written=written) for number, message in enumerate(tools)]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
            found.append(([ask, answer], [dict(message) for message in new]))
    return [*found, plain]


def _call(message: Message, text: str, *, written: bool) -> dict[str, Any]:
    """Return the call that a tool's message answers."""
    arguments = {"x": text}
    function = {"name": message.get("name") or "f", "arguments": json.dumps(arguments) if written else arguments}
    return {"type": "function", "id": message["tool_call_id"], "function": function}


def with_callers(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation in which messages of tools have the name and the id of the call that they answer.

    It is the call with the id, or the name, of the message, or else the first one that has no answer yet.
    """
    named, waiting = list[dict[str, Any]](), list[tuple[Any, Any]]()
    for message in map(dict, messages):
        if message.get("role") == "assistant":
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
            waiting = [(call.get("id"), call.get("function", call).get("name")) for call in calls]
        elif message.get("role") == "tool":
            keys = message.get("tool_call_id"), message.get("name")
            fits = [
                call
                for call in waiting
                if all(not key or of in (None, key) for key, of in zip(keys, call, strict=True))
            ]
            if fits:
                waiting.remove(fits[0])
                found = zip(("tool_call_id", "name"), fits[0], strict=True)
                message |= {key: value for key, value in found if value is not None}
        named.append(message)
    return named


def _short_text(content: Any) -> Any:
    """Return the content of a message with short texts, and pictures where they are."""
    if not isinstance(content, list):
        return "x"
    return [{**part, "text": "x"} if part.get("type") == "text" else part for part in content]


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
