"""Parsers that split an answer into text, reasoning and tool calls, from other libraries.

The package ``renderers`` knows many model families, and transformers parses with a response template. A parser has to
read the call that the tokenizer's chat template writes, or an error is raised before anything is generated.
"""

import itertools
import json
import os.path
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser
from typing_extensions import override

from lightning_rl.environments.environment import Action, ToolCall
from lightning_rl.environments.json_calls import UNREAD, JsonParser, function_in, read_call, with_unread_call
from lightning_rl.environments.thoughts import ThoughtParser
from lightning_rl.rewards.optional_imports import require
from lightning_rl.samples import Message
from lightning_rl.utils.decoding import decode_completions

HERMES = "hermes"
HARMONY = "gpt-oss"  # its renderer reads no answer behind the header that the chat template writes
JSON = ("json", "llama-3")  # the renderer of Llama 3 takes several calls, and broken ones, for text
JSON_HEAD = re.compile(r'\[?\s*(\{\s*("type":\s*"function",\s*)?"(function":\s*\{\s*"name|name)":\s*")?$')
MAX_SHOWN = 120  # characters of a misread text in messages


class AnswerParser(Protocol):
    """Parser that splits an answer into text, reasoning and tool calls."""

    def __call__(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        """Return the parts of an answer to a prefix, for a policy with these tool schemas."""
        ...


ParserSource = AnswerParser | Mapping[str, Any] | str
"""Parser, response template of transformers, or name of a renderer; ``"hermes"`` for calls as JSON in tags, ``"json"``
for JSON or Python without a tag around each call."""


class ParserError(ValueError):
    """No parser reads the tool calls of a chat template."""


def check_source(source: Any) -> Any:
    """Check the source of a parser.

    Raises:
        ValueError: If it is none; names the alternatives.
    """
    if source is None or callable(source) or isinstance(source, (Mapping, str)):
        return source
    raise ValueError(
        "expected tool_parser to be a response template of transformers, the name of a renderer, 'hermes', 'json', a "
        f"function or None, got {source!r}"
    )


def plain_text(tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> AnswerParser:
    """Return a parser that takes all of an answer as text, without the ids ``ends`` that end a response."""

    def parse(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        del prefix_ids, tools
        return Action(text=decode_completions(tokenizer, [token_ids], ends)[0])

    return parse


def truncated_parser(
    parse: AnswerParser, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> AnswerParser:
    """Return a parser of truncated answers, in which a call is text; functions of users do not get those."""
    plain = plain_text(tokenizer, ends)
    if not isinstance(parse, ThoughtParser):
        return plain

    def read(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        answer = parse(token_ids, prefix_ids, tools)
        return plain(token_ids, prefix_ids, tools) if answer.tool_calls or answer.errors else answer

    return read


def before_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stops: Sequence[str]
) -> tuple[Sequence[int], str | None]:
    """Return the ids of an answer's text before the first of ``stops``, and that stop; all ids and None without one."""
    text = str(tokenizer.decode(list(token_ids)))
    if not (places := [(text.find(stop), stop) for stop in stops if stop in text]):
        return token_ids, None
    place, stop = min(places)
    return tokenizer(text[:place], add_special_tokens=False)["input_ids"], stop


@dataclass(frozen=True, slots=True)
class TemplateParser(ThoughtParser):
    """Parser with a response template of transformers, which reports the fault of every unparsable call.

    Args:
        tokenizer: Tokenizer of the ids.
        template: Response template, as in ``tokenizer.response_template``.
    """

    template: Mapping[str, Any]

    @property
    def _keeps_types(self) -> bool:
        """True if calls are written with the types of their arguments, which the schemas of tools must not change."""
        calls = self.template.get("fields", {}).get("tool_calls")
        return isinstance(calls, Mapping) and calls.get("content") in ("json", "python-call-list")

    @override
    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        text, prefix = (str(self.tokenizer.decode(list(ids))) for ids in (token_ids, prefix_ids))
        broken: list[str] = []
        try:
            response = _Response(dict(self.template), prefix, () if self._keeps_types else tools, broken)
            response.feed(text)
            message, _ = response.finalize()
        except Exception as error:  # noqa: BLE001  a policy may write anything
            return _unreadable(self.tokenizer, token_ids, error)
        calls, errors = _read_calls([function_in(function_in(call)) for call in message.get("tool_calls") or ()])
        keys = ("reasoning_content", "thinking", "reasoning")
        reasoning = next((message[key] for key in keys if message.get(key)), None)
        text = _text(message.get("content"))
        answer = Action(text=text, tool_calls=calls, reasoning=reasoning, errors=[*broken, *errors])
        return with_unread_call(answer, tools)


class _Response(ResponseParser):
    """Response in which a region that cannot be read is an error, and the others are kept."""

    def __init__(self, template: dict[str, Any], prefix: str, tools: Sequence[Any], broken: list[str]) -> None:
        self._broken, self._ends = broken, False
        super().__init__(template, prefix, tools=list(tools) or None)

    @override
    def _scan(self, watch: list[Any], eos: bool) -> Any:
        found = super()._scan(watch, eos)
        self._ends = eos and found[0] is None
        return found

    @override
    def _close_current(self, events: list[dict]) -> None:
        try:
            if self._ends and self._current == "tool_calls" and self._spec.fields[self._current].close_re is not None:
                raise ValueError(f"it is not closed: {self._body!r:.500}")
            super()._close_current(events)
        except Exception as error:  # noqa: BLE001  a policy may write anything
            self._broken.append(f"a tool call could not be read: {error}")
            self._reset_to_implicit()


@dataclass(frozen=True, slots=True)
class RendererParser(ThoughtParser):
    """Parser with a renderer of the package ``renderers``, which reports the fault of every unparsable call.

    Args:
        tokenizer: Tokenizer of the ids.
        name: Name of the renderer.
        options: Further arguments of the chat template, such as ``enable_thinking``; the renderer gets those it knows.

    Raises:
        ImportError: If the package is missing; says how to install it.
        ParserError: If there is no such renderer, or it does not fit the tokenizer.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    _renderer: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        """Create the renderer."""
        require("renderers", extra="renderers")
        from renderers import config_from_name, create_renderer, template_field_names

        try:
            if self.name == "auto":
                raise ValueError("it asks a server which model this is")
            config: Any = config_from_name(self.name)
            known = {name: self.options[name] for name in template_field_names(config) & self.options.keys()}
            renderer = create_renderer(self.tokenizer, config, chat_template_kwargs=known)
            object.__setattr__(self, "_renderer", renderer)
        except Exception as error:
            raise ParserError(
                f"expected tool_parser to be the name of a renderer that fits the tokenizer, got {self.name!r}: {error}"
            ) from error

    @override
    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        functions = [schema.get("function", schema) for schema in tools]
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=functions or None, prompt_ids=list(prefix_ids)
            )
        except Exception as error:  # noqa: BLE001  as above
            return _unreadable(self.tokenizer, token_ids, error)
        whole = [call for call in parsed.tool_calls if call.status in ("ok", "unknown_tool")]
        calls, errors = _read_calls([_whole_call(call) for call in whole])
        broken = [f"{call.status}: {call.raw}" for call in parsed.tool_calls if call not in whole]
        text, reasoning = _text(parsed.content), parsed.reasoning_content
        if reasoning and str(self.tokenizer.decode(list(token_ids))).strip().startswith(reasoning.strip()):
            text, reasoning = f"{reasoning}{text}", None  # no tag before it, so it is the text
        answer = Action(text=text, tool_calls=calls, reasoning=reasoning, errors=[*errors, *broken])
        return with_unread_call(answer, tools)


def parser_for(
    tokenizer: PreTrainedTokenizerBase, source: ParserSource | None = None, options: Mapping[str, Any] | None = None
) -> AnswerParser:
    """Return a parser of the tool calls that a tokenizer's chat template writes.

    Args:
        tokenizer: Tokenizer with a chat template.
        source: Parser, response template of transformers, name of a renderer, or ``"hermes"``; None for the first of
            these that reads the template's own call: the renderer of the tokenizer's name, the tokenizer's response
            template, ``"hermes"``, ``"json"``.
        options: Further arguments of the chat template.

    Raises:
        ParserError: If there is none; says what was tried and what to pass.
    """
    if callable(source):
        return source
    tried: list[str] = []
    for name, make in _candidates(tokenizer, source, options or {}):
        try:
            parser = make()
        except (ImportError, ParserError) as error:
            tried.append(str(error))
            continue
        if (fault := misread(parser, tokenizer, options)) is None:
            return parser
        tried.append(f"{name}: {fault}")
    raise ParserError(
        f"expected a parser of the tool calls of {tokenizer.name_or_path or 'this tokenizer'}, got none that reads "
        f"what its chat template writes ({'; '.join(tried)}): pass tool_parser= with a response template of "
        "transformers, the name of a renderer (pip install 'lightning-rl[renderers]'), or a function of (token_ids, "
        "prefix_ids, tools) that returns an Action"
    )


def _candidates(
    tokenizer: PreTrainedTokenizerBase, source: Mapping[str, Any] | str | None, options: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], AnswerParser]]]:
    """Yield the parsers to try with their names."""
    if isinstance(source, Mapping):
        yield "the response template", lambda: TemplateParser(tokenizer, source)
        return
    name = _renderer_name(tokenizer) if source is None else source
    if name is not None and name not in (HERMES, HARMONY, *JSON):
        yield f"renderer {name!r}", lambda: RendererParser(tokenizer, name, options)
    template = getattr(tokenizer, "response_template", None)
    if source is None and template is not None:
        yield "the tokenizer's response template", lambda: TemplateParser(tokenizer, template)
    if name == HARMONY or (source is None and "<|channel|>" in tokenizer.get_added_vocab()):
        yield repr(HARMONY), lambda: TemplateParser(tokenizer, HARMONY_TEMPLATE)
    if source in (None, HERMES):
        yield repr(HERMES), lambda: TemplateParser(tokenizer, hermes_template(tokenizer, options))
    if source in (None, *JSON):
        head = _call_head(tokenizer, options).rpartition("</think>")[2]
        yield repr(JSON[0]), lambda: JsonParser(tokenizer, JSON_HEAD.sub("", head).strip())


def _renderer_name(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the renderer of a tokenizer's model name, if the package is installed and knows it."""
    if find_spec("renderers") is None:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(tokenizer.name_or_path)


def hermes_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response template for calls as JSON in ``<tool_call>`` tags and reasoning in ``<think>`` tags.

    An answer begins after the chat template's generation prompt.

    Raises:
        ParserError: If the chat template has none.
    """
    texts = [_render(tokenizer, [QUESTION], options, add_generation_prompt=add) for add in (False, True)]
    anchor = texts[1][len(os.path.commonprefix(texts)) :].partition("<think>")[0]  # noqa: RUF071  of characters
    if not anchor:
        raise ParserError("'hermes': the chat template writes nothing at the head of an answer")
    return {
        "start_anchor": anchor,
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": "</tool_call>|(?=<tool_call>)",  # the next call ends one that is not closed
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": list(tokenizer.all_special_tokens), "repeats": True, "join": "\n"},
        },
    }


_START, _TO = r"(?:<\|start\|>assistant)?", r" *to=(?:functions\.)?(?P<name>[\w.-]+) *"
HARMONY_TEMPLATE: dict[str, Any] = {  # an answer is one or several messages, with a channel each
    "start_anchor": "<|start|>assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {
            "open_pattern": rf"{_START}<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|(?:end|return|call)\|>|(?=<\|start\|>)",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {  # the recipient is before or after the channel
            "open_pattern": rf"{_START}(?:{_TO}<\|channel\|>[^<]*|<\|channel\|>\w+{_TO}[^<]*)"
            r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close_pattern": r"<\|call\|>|(?=<\|start\|>)",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "header": {"open_pattern": r"<\|(?:start|channel)\|>", "close": "<|message|>", "repeats": True, "join": "\n"},
        "content": {"close": ["<|end|>", "<|return|>", "<|call|>"], "repeats": True, "join": "\n"},
    },
}
NAME, EARLIER, LATER = "look_at", "words-of-an-earlier-answer", "words-of-this-answer"
QUESTION: Message = {"role": "user", "content": "?"}
AGAIN = "it reads the call of an earlier answer again"
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "where"}},
    "required": ["x"],
}
TOOL = {"type": "function", "function": {"name": NAME, "description": "Looks.", "parameters": PARAMETERS}}


def misread(
    parser: AnswerParser, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> str | None:
    """Return a description of how a parser misreads a call or a text of the chat template; None if it reads both.

    Some templates write the opening of calls once in a conversation, so a call after another one, which a parser that
    reads that again would repeat, or the first one of a conversation has to be read.
    """
    options = options or {}
    calls = _written_calls(tokenizer, options)
    if not calls and _renders_call(tokenizer, options):
        return "the tokenizer has no tokens for the tool calls that the chat template writes"
    if not calls:
        return "the chat template writes no tool calls"
    faults = [_misread_call(_read(parser, tokenizer, *call), call[1]) for call in calls]
    if AGAIN in faults or None not in faults:
        return AGAIN if AGAIN in faults else faults[0]
    said = _write_answer(tokenizer, options, [QUESTION, _say(EARLIER), QUESTION], _say(LATER))
    if said is not None and LATER not in (text := _read(parser, tokenizer, *said).text):
        return f"in {said[1][:MAX_SHOWN]!r} it reads {repr(text) if text else 'no text'}"
    return None


def _misread_call(answer: Action, written: str) -> str | None:
    calls = [(call.name, dict(call.arguments)) for call in answer.tool_calls]
    if any(arguments.get("x") == EARLIER for _, arguments in calls):
        return AGAIN
    errors = [" ".join(error.split())[:MAX_SHOWN] for error in answer.errors if not error.endswith(UNREAD)]
    right = calls == [(NAME, {"x": LATER})]
    return None if right else f"in {written[:MAX_SHOWN]!r} it reads {calls or errors or 'no call'}"


def _read(parser: AnswerParser, tokenizer: PreTrainedTokenizerBase, prefix: list[int], text: str) -> Action:
    return parser(tokenizer(text, add_special_tokens=False)["input_ids"], prefix, [TOOL])


def _written_calls(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[tuple[list[int], str]]:
    """Return the ids before a call and its text, as written by the chat template after another call, and as the first.

    Templates differ in the ids, contents and arguments that they take.
    """
    found: list[tuple[list[int], str]] = []
    for number in (1, 0):
        for content, as_text, name in itertools.product(("", None), (False, True), ("call0000", f"functions.{NAME}:")):
            earlier, later = (
                _call_message(words, f"{name}{place}", content, as_text=as_text)
                for place, words in enumerate((EARLIER, LATER))
            )
            written = _write_answer(tokenizer, options, [QUESTION, *[earlier, QUESTION] * number], later)
            if written is not None and NAME in written[1]:
                found.append(written)
                break
    return found


def _renders_call(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> bool:
    """Return True if the text of the chat template has a call, before the tokenizer encodes it."""
    call = [QUESTION, _call_message(LATER, "call00000", "", as_text=False)]
    try:
        return LATER in _render(tokenizer, call, options, add_generation_prompt=False)
    except Exception:  # noqa: BLE001  a template may raise anything
        return False


def _call_head(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """Return what the chat template writes before the name of a conversation's first call; empty if it writes none."""
    calls = _written_calls(tokenizer, options)
    return calls[-1][1].partition(NAME)[0] if calls else ""


def _write_answer(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], before: Sequence[Message], answer: Message
) -> tuple[list[int], str] | None:
    """Return the ids before an answer and its text, as written by the chat template; None if it does not."""
    try:
        texts = [
            _render(tokenizer, before, options, add_generation_prompt=True),
            _render(tokenizer, [*before, answer], options, add_generation_prompt=False),
        ]
    except Exception:  # noqa: BLE001  a template may raise anything
        return None
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    prefix = list(os.path.commonprefix(ids))  # noqa: RUF071  of tokens
    written = str(tokenizer.decode(ids[1][len(prefix) :])).rstrip()
    return (prefix, written) if LATER in written else None


def _say(words: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def _call_message(words: str, number: str, content: str | None, *, as_text: bool) -> Message:
    """Return a call whose arguments are an object, as most templates expect, or JSON text."""
    arguments = {"x": words}
    function = {"name": NAME, "arguments": json.dumps(arguments) if as_text else arguments}
    return _say(content) | {"tool_calls": [{"type": "function", "id": number, "function": function}]}


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any], **more: Any
) -> str:
    copies: Any = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(copies, **dict[str, Any](options, tools=[TOOL], tokenize=False) | more))


def _whole_call(call: Any) -> dict[str, Any]:
    """Return a call of a renderer, whose arguments may have been left out because of their key."""
    read = {"name": call.name, "arguments": call.arguments, "id": call.id}
    try:
        written = {} if call.arguments else json.loads(call.raw)
    except (ValueError, RecursionError):  # another format
        return read
    return {**written, "id": call.id} if isinstance(written, Mapping) and written.get("name") == call.name else read


def _read_calls(functions: Sequence[Any]) -> tuple[list[ToolCall], list[str]]:
    """Return the valid calls and the faults of the others."""
    calls, errors = list[ToolCall](), list[str]()
    for function in functions:
        try:
            calls.append(read_call(function, id=function.get("id") if isinstance(function, Mapping) else None))
        except ValueError as error:
            errors.append(str(error))
    return calls, errors


def _unreadable(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], error: Exception) -> Action:
    answer = plain_text(tokenizer)(token_ids, (), ())
    return Action(text=answer.text, errors=[f"the tool calls could not be read: {error}"])


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts of a message
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
