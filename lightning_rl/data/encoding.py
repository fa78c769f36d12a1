"""Encoding of prompts as token ids."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from lightning_rl.data.dropped_parts import dropped_parts, mark_messages, moved_parts
from lightning_rl.data.pictures import column_pictures, is_picture, pixels_of, place_pictures
from lightning_rl.data.row_schema import CONTINUES, TOOLS, VARIABLES, PromptForm, Reading, has_pictures, is_token_ids
from lightning_rl.policy.processor import PictureProcessor, Pixels, processor_of
from lightning_rl.samples import Media, Prompt
from lightning_rl.utils.arguments import check_choices, check_counts, check_unicode
from lightning_rl.utils.chat_rendering import apply_template
from lightning_rl.utils.naming import in_words
from lightning_rl.utils.template_date import FIXED, TODAY, TemplateDate

TooLong = Literal["error", "drop"]

LengthOf = Callable[[Prompt], int | None]
"""Function from a prompt to the number of tokens with which its conversation begins; None for its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Encoder that tokenizes strings with special tokens, renders chats with the chat template, and keeps token ids.

    Args:
        tokenizer: Tokenizer; None if all prompts are token ids.
        max_tokens: Maximum number of tokens per prompt; None for no limit.
        limit: Name of the setting behind ``max_tokens``, for errors.
        vocabulary: Vocabulary size of the policy; None for no check.
        chat_template_kwargs: Further variables of the chat template.
        template: Chat template, if two encoders are compared.
        date: Date that the chat template may write.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    max_tokens: int | None = None
    limit: str = "context window minus max_new_tokens"
    vocabulary: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: Any = None
    date: TemplateDate = TODAY

    @classmethod
    def of(
        cls,
        form: PromptForm,
        max_prompt_tokens: int | None,
        tokenizer: PreTrainedTokenizerBase | None,
        max_tokens: int | None,
        vocabulary: int | None,
    ) -> "Encoder":
        """Return the encoder of rows of a form for a policy; the smaller limit applies."""
        options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens, "vocabulary": vocabulary}
        if max_prompt_tokens is not None and (max_tokens is None or max_prompt_tokens < max_tokens):
            options |= {"max_tokens": max_prompt_tokens, "limit": "max_prompt_tokens"}
        return cls(chat_template_kwargs=form.chat_template_kwargs or {}, **options)

    def without_limit(self) -> "Encoder":
        """Return this encoder without limits, for the fingerprint of the data."""
        template = getattr(self.tokenizer, "chat_template", None)
        return replace(self, max_tokens=None, limit="", vocabulary=None, template=template, date=FIXED)

    @property
    def processor(self) -> PictureProcessor | None:
        """Processor of pictures; None for a policy that reads none."""
        return processor_of(self.tokenizer)

    def prompts(
        self, readings: Sequence[Reading], places: Sequence[int] | None = None, data_columns: tuple[str, ...] = ()
    ) -> list[Prompt]:
        """Return the prompts of rows; strings and chats are tokenized in batches.

        Args:
            readings: Rows.
            places: Indices of the prompts in the stream; 0, 1, 2, ... by default.
            data_columns: Names of the columns of all rows.

        Raises:
            ValueError: If a prompt is empty, outside of the vocabulary, needs a tokenizer or chat template, or has
                messages that the chat template drops, or pictures that cannot be read.
        """
        encodings: dict[int, tuple[int, ...]] = {}
        plain, rendered, checked, media = dict[int, str](), dict[int, str](), set[str](), dict[int, Media]()
        placed = [self._place_pictures(reading) for reading in readings]
        readings = [reading for reading, _ in placed]
        for number, (reading, pictures) in enumerate(placed):
            content, name = reading.content, reading.name
            if is_token_ids(content):
                encodings[number] = tuple(int(token) for token in content)
            elif isinstance(content, str):
                self._tokenizer_for(name)
                plain[number] = _whole(content, name)
            else:
                text = _whole(self._render(reading), name, reading.variables)
                form = repr((mark_messages(content), reading.variables))
                if form not in checked:  # once for all prompts of the same roles and variables
                    checked.add(form)
                    self._check_variables(reading)
                    self._check_parts(reading)
                if self.processor is not None and pictures:
                    encodings[number], media[number] = self.processor.encode(text, pictures, name)
                    continue
                rendered[number] = text
        names = [reading.name for reading in readings]
        encodings |= self._tokenize(plain, names) | self._tokenize(rendered, names, add_special_tokens=False)
        prompts = list[Prompt]()
        for number, reading in enumerate(readings):
            self._check(reading.content, reading.name, encodings[number])
            if self.processor is not None and number not in media:
                self.processor.check_ids(encodings[number], reading.name)
            record = reading.content, reading.columns, reading.variables, data_columns
            place = number if places is None else places[number]
            prompts.append(Prompt(place, encodings[number], *record, media=media.get(number)))
        return prompts

    def _place_pictures(self, reading: Reading) -> tuple[Reading, list[Pixels]]:
        """Return a row with a part for each picture in its messages, and the pictures.

        Raises:
            ValueError: If it has pictures but the policy reads none, or if it is no chat.
        """
        content, columns = reading.content, column_pictures(reading.columns)
        is_chat = not isinstance(content, str) and not is_token_ids(content)
        if self.processor is None:
            in_text = is_chat and any(has_pictures(message.get("content")) for message in content)
            if in_text or any(map(is_picture, columns)):
                raise ValueError(
                    f"expected text, since the policy reads no pictures, got a picture in {reading.name}: pass "
                    "tokenizer=AutoProcessor.from_pretrained(...) of the policy, or leave the pictures out"
                )
            return reading, []
        if not is_chat:
            if columns:
                raise ValueError(
                    f"expected chat messages for the pictures of {reading.name}, got {type(content).__name__}: pass "
                    "chat=True to make a chat of a text"
                )
            return reading, []
        messages, found = place_pictures(content, columns, reading.name)
        names = (f"picture {number} of {reading.name}" for number in range(len(found)))
        return reading._replace(content=messages), [pixels_of(*pair) for pair in zip(found, names, strict=True)]

    def check_length(self, length: int, name: str) -> None:
        """Check the number of tokens of a prompt.

        Raises:
            ValueError: If it is too long; with its name, its length and the limit.
        """
        if self.max_tokens is not None and length > self.max_tokens:
            further = ", or raise it" if self.limit == "max_prompt_tokens" else ", or lower max_new_tokens"
            raise ValueError(
                f"expected prompts of at most {self.max_tokens} tokens ({self.limit}), got {name} with {length}: "
                f'shorten or drop it (too_long="drop" drops all such prompts){further}'
            )

    def _tokenizer_for(self, name: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"expected a tokenizer for {name}, got none: pass tokenizer= to the module, or token ids")
        return self.tokenizer

    def _render(self, reading: Reading) -> str:
        from jinja2 import TemplateError  # a dependency of transformers' chat templates

        tokenizer = self._tokenizer_for(reading.name)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"expected a tokenizer with a chat template, because {reading.name} is a list of messages: set "
                "tokenizer.chat_template, or pass strings"
            )
        try:
            return self._write(tokenizer, reading.content, reading.variables)
        except TemplateError as error:
            roles = [message["role"] for message in reading.content]
            raise ValueError(
                f"expected messages that the tokenizer's chat template takes, but it refuses {reading.name}, whose "
                f"roles are {', '.join(roles)}: {error}"
            ) from error

    def _write(self, tokenizer: PreTrainedTokenizerBase, messages: Any, variables: Mapping[str, Any]) -> str:
        options = {**self.chat_template_kwargs, **variables}
        continues = bool(options.pop(CONTINUES, False)) and messages[-1]["role"] == "assistant"
        options = self.date.options(tokenizer, add_generation_prompt=not continues, **options)
        return str(apply_template(tokenizer, messages, tokenize=False, continue_final_message=continues, **options))

    def _check_variables(self, reading: Reading) -> None:
        """Raise ValueError for a variable that neither the chat template nor the function that renders it has."""
        tokenizer, options = self._tokenizer_for(reading.name), {**self.chat_template_kwargs, **reading.variables}
        names = _variables_of(tokenizer.get_chat_template(options.get("chat_template"), options.get(TOOLS)))
        for name in options.keys() - names - inspect.signature(tokenizer.apply_chat_template).parameters.keys():
            near = get_close_matches(name, names, 1)
            raise ValueError(
                f"expected {VARIABLES} to hold variables of the chat template, got {in_words([name])} for "
                f"{reading.name}: "
                + (f"write {in_words(near)}" if near else "leave it out, or set a template that reads it")
            )

    def _check_parts(self, reading: Reading) -> None:
        tokenizer = self._tokenizer_for(reading.name)
        options = {**self.chat_template_kwargs, **reading.variables}
        tools = [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in options.get(TOOLS) or ()]

        def render(messages: Sequence[Any], schemas: Sequence[Any]) -> str:
            return self._write(tokenizer, messages, {**reading.variables, **({TOOLS: schemas} if schemas else {})})

        if lost := dropped_parts(render, reading.content, tools):
            raise ValueError(
                f"expected a chat template that writes all parts of {reading.name}, got one that drops "
                f"{', '.join(lost)}: set a tokenizer.chat_template that writes them, or move their text into messages "
                "of other roles"
            )
        if moved := moved_parts(render, reading.content):
            raise ValueError(
                f"expected a chat template that writes {reading.name} in its order, got one that writes "
                f"{', '.join(moved)} before the answer that it follows, where the policy would not read it: give it "
                "the role user, or set another tokenizer.chat_template"
            )

    def _tokenize(self, texts: Mapping[int, str], names: Sequence[str], **options: Any) -> dict[int, tuple[int, ...]]:
        """Return the token ids of each text; raise ValueError with the name of one that cannot be encoded."""
        if not texts or self.tokenizer is None:
            return {}
        try:
            encodings = self.tokenizer(list(texts.values()), **options)["input_ids"]
        except Exception as error:  # of tokenizers, which does not name the text
            if len(texts) > 1:
                for number, text in texts.items():
                    self._tokenize({number: text}, names, **options)
                raise
            ((number, text),) = texts.items()
            raise ValueError(
                f"expected {names[number]} to be a text that the tokenizer encodes, got {text!r:.200}, on which it "
                f"raises {error}: pass the tokenizer of the policy, or one with an unk_token, or prompts of its words"
            ) from error
        return {number: tuple(ids) for number, ids in zip(texts, encodings, strict=True)}

    def _check(self, content: Any, name: str, ids: tuple[int, ...]) -> None:
        if not ids:
            raise ValueError(f"expected {name} to have at least one token, got none: {content!r:.200}")
        text = self.vocabulary is not None and not is_token_ids(content)  # for a policy, which would read nothing
        if self.tokenizer is not None and text and _unknown(self.tokenizer, ids):
            raise ValueError(
                f"expected {name} to have words that the tokenizer knows, got {self.tokenizer.unk_token} alone: "
                f"{content!r:.200}: pass the tokenizer of the policy, or prompts in its vocabulary"
            )
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise ValueError(
                f"expected token ids in [0, {self.vocabulary}), got {min(ids)} to {max(ids)} in {name}: the tokenizer "
                "does not fit the policy"
            )


@lru_cache(maxsize=8)
def _variables_of(template: str) -> frozenset[str]:
    """Return the names in the code of a chat template, without those of attributes."""
    from jinja2 import Environment

    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    pairs = zip([("", ""), *tokens], tokens, strict=False)
    return frozenset(text for (_, before), (kind, text) in pairs if kind == "name" and before != ".")


def _whole(text: str, name: str, variables: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a text; raise ValueError for half of a surrogate pair, which no tokenizer encodes."""
    try:
        check_unicode(text, name, 'repair the data, or pass preprocess= with text.encode("utf-8", "replace").decode()')
    except ValueError:
        for key, value in variables.items():
            _whole(json.dumps(value, ensure_ascii=False, default=str), f"{key} of {name}")
        raise
    return text


def _unknown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Return True if all tokens of a text, beside special ones, are unknown."""
    unknown = tokenizer.unk_token_id
    return unknown is not None and unknown in ids and set(ids) <= {unknown, *tokenizer.all_special_ids}


def check_limits(max_prompt_tokens: int | None, too_long: str) -> None:
    """Check the options about long prompts.

    Raises:
        ValueError: With the option, its value and the valid values.
    """
    check_counts(1, optional=True, max_prompt_tokens=max_prompt_tokens)
    check_choices(get_args(TooLong), too_long=too_long)
