"""Bridge: the tokens between two answers of a policy, without rendering again what it said.

A chat template writes the same after an answer whatever the answer was. So a dummy conversation is rendered, whose
answer is a mark, and what follows the mark is taken, from the token on that closes the answer. The conversation goes on
with it: prefix + drawn + bridge, by concatenation, and no token that was drawn is ever encoded again.
"""

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.environments.environment import Message
from lightning_rl.environments.form import strings_of

MARK = "mark-of-an-answer-7f3a"
KINDS: dict[str, tuple[str, ...]] = {"user": ("user",), "tool": ("tool",), "two tools": ("tool", "tool")}
WORDS = ("first-thing-said 41", "second-thing-said 52")  # nothing that a template writes
MAX_CHARACTERS = 2**22  # of messages together: more fits into no context, and takes minutes to encode
CALL_ID = "call{:05d}"  # nine letters, as Mistral wants them


class BridgeError(ValueError):
    """The chat template does not say what comes between two answers."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """What a tokenizer's chat template writes between answers.

    Args:
        tokenizer: with a chat template.
        close: the ids that end an answer: those that end a response of the run.
        options: further arguments of the template, the same as for the prompts.

    Raises:
        BridgeError: if there is no template or nothing ends an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    close: Collection[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    _control: Mapping[int, str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what every bridge needs."""
        if not self.tokenizer.chat_template:
            raise BridgeError("expected a tokenizer with a chat template for an environment in messages, got none")
        if not self.close:
            raise BridgeError(
                "expected ids that end an answer, got none: pass sampling=Sampling(eos_token_ids=[...]) with the "
                "token that the chat template writes behind an answer"
            )
        object.__setattr__(self, "_control", control_tokens(self.tokenizer))

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """The prompt of a conversation that begins with messages, in which no text of theirs is a control token.

        Args:
            messages: of anybody, at least one.
            tools: schemas of what the policy may call.

        Raises:
            BridgeError: if the template does not render them; the message says why.
        """
        return self._ids(messages, tools=list(tools) or None)

    def after(self, drawn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """What follows an answer: its closing token unless it was drawn, the messages, and the head of the next answer.

        Args:
            drawn: the answer's token ids.
            messages: of users or tools, at least one.

        Raises:
            BridgeError: if the template does not render them, or if their text became control tokens; the message says
                why.
        """
        ids = self.tail(messages)
        harmless = self.tail([{**message, "content": "x"} for message in messages])
        if self._count(ids) > self._count(harmless):
            raise BridgeError("the environment's text became control tokens, which could end its turn")
        if not drawn or drawn[-1] not in self.ends:
            return ids
        return ids[1:] if drawn[-1] == ids[0] or not self.closes_as_head(ids) else ids

    @property
    def ends(self) -> Collection[int]:
        """The ids that close an answer as a template does: control tokens, unless words alone end responses."""
        return frozenset(self.close) & self._control.keys() or self.close

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token in self._control for token in ids)

    def closes_as_head(self, ids: Sequence[int]) -> bool:
        """Of a tail, whether what closes an answer begins the next message too, as where a speaker's name does both."""
        special = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = next((place for place in range(1, len(ids)) if ids[place] in special), len(ids))
        return bool(str(self.tokenizer.decode(list(ids[1:end]))).strip())

    def tail(self, messages: Sequence[Message], history: Sequence[Message] = ()) -> tuple[int, ...]:
        """From the token that closes an answer, included, to where the next answer begins."""
        refused: list[str] = []
        for talk, new in dummies(messages):
            try:
                return self._cut([*history, *talk], new)
            except BridgeError as error:
                refused.append(str(error))
        raise BridgeError("; ".join(dict.fromkeys(refused)))

    def _cut(self, talk: Sequence[Message], new: Sequence[Message]) -> tuple[int, ...]:
        before, found, after = self._text([*talk, *new]).partition(MARK)
        if not found:
            raise BridgeError("the template does not write what an answer says: it has to write each message's content")
        if MARK in after:
            raise BridgeError("the template writes an answer twice that was given once")
        closing = self._closing(self.tokenizer(before, add_special_tokens=False)["input_ids"])
        ids = self._ids([*talk, *new])
        places = [place for place, token in enumerate(ids) if token in self.ends]
        if len(places) <= closing:
            raise BridgeError(self._missing_end(after))
        return tuple(ids[places[closing] :])

    def _missing_end(self, after: str) -> str:
        """What is wrong with a template that writes none of the closing ids behind an answer."""
        said = f"the template ends an answer by none of the ids {sorted(self.close)} that end a response"
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        token = next((token for token in ids if token in self._control), None)
        if token is None:
            return f"{said}, nor by another control token: it has to write one behind each answer"
        return (
            f"{said}, but by {self._control[token]!r} (id {token}): pass sampling=Sampling(eos_token_ids="
            f"{sorted({*self.close, token})})"
        )

    def _closing(self, ids: Sequence[int]) -> int:
        return sum(token in self.ends for token in ids)

    def _text(self, messages: Sequence[Message]) -> str:
        return str(self._render(messages, tokenize=False))

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The conversation as ids, in which no text of a message is a control token."""
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
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, **{**self.options, **options}
            )
        except Exception as error:  # a template may raise anything
            raise BridgeError(f"the template refuses it: {type(error).__name__}: {error}") from error

    def check(self, kind: str) -> list[str]:
        """What is wrong with the bridge over messages of a kind, nothing if it can be relied on.

        Args:
            kind: one of :data:`KINDS`.
        """
        new = [{"role": role, "content": words, "name": "f"} for role, words in zip(KINDS[kind], WORDS, strict=False)]
        try:
            ids = self.tail(new)
        except BridgeError as error:
            return [str(error)]
        found: list[str] = []
        for what, history in self._histories().items():
            try:
                same = self.tail(new, history) == ids
            except BridgeError:
                continue  # a template that refuses a system message is no finding
            if not same:
                found.append(f"the template writes something else after {what}")
        text = self.tokenizer.decode(list(ids))
        found += [f"the template drops the text of a {m['role']} message" for m in new if m["content"] not in text]
        return list(dict.fromkeys(found))

    def _histories(self) -> dict[str, list[Message]]:
        talk: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        return {"a longer conversation": [*talk, *talk], "a system message": [{"role": "system", "content": "?"}]}


SANITIZES = "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """What only a template may write: special tokens, and added ones that it names; blanks may stand in any text."""
    template = str(tokenizer.chat_template)
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if number != tokenizer.unk_token_id  # which is what any text becomes that the vocabulary lacks
        and (token.special or (token.content in template and not token.content.isspace()))
    }


def dummies(messages: Sequence[Message]) -> list[tuple[list[Message], list[Message]]]:
    """Conversations up to a marked answer, with the messages as they follow it; the first that a template takes counts.

    A tool's message first follows a real call, from which some templates take its name or its id. Most templates write
    arguments as JSON themselves, some want them written.
    """
    ask: Message = {"role": "user", "content": "?"}
    new = [dict(message) for message in messages]
    plain = ([ask, {"role": "assistant", "content": MARK}], list[Message](new))
    tools = [message for message in new if message.get("role") == "tool"]
    if not tools:
        return [plain]
    for number, message in enumerate(tools):
        message["tool_call_id"] = message.get("tool_call_id") or CALL_ID.format(number)
    talks: list[tuple[list[Message], list[Message]]] = []
    for written in (False, True):
        calls = [_call(message, MARK if number == 0 else "?", written=written) for number, message in enumerate(tools)]
        talks.append(([ask, {"role": "assistant", "content": "", "tool_calls": calls}], list[Message](new)))
    return [*talks, plain]


def _call(message: Message, text: str, *, written: bool) -> dict[str, Any]:
    """The call that a tool's message answers."""
    arguments = {"x": text}
    function = {"name": message.get("name") or "f", "arguments": json.dumps(arguments) if written else arguments}
    return {"type": "function", "id": message["tool_call_id"], "function": function}
