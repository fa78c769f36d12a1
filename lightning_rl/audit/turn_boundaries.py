"""Tokens between two answers and at the beginning of contexts, compared with those of the chat template.

Two conversations that differ only in an answer are rendered. Their common end contains the tokens after the answer,
from the token that closes it. This is independent of the rendering in the run, so it detects any difference between
messages and tokens, such as a single space.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_rl.audit.conversation_evidence import AuditedConversation
from lightning_rl.data.row_schema import TOOLS, own_variables
from lightning_rl.environments import Bridge, BridgeError, Message
from lightning_rl.environments.chat_template import MARK, SANITIZES, control_tokens, dummies
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.environments.program import Program
from lightning_rl.environments.run_environments import Environments
from lightning_rl.policy.processor import Pixels, processor_of
from lightning_rl.testing.properties.subsample import order_of

MAX_WRITTEN = 24  # per audit
OTHER = "another answer, of other words!"  # replaces the mark


class Written(NamedTuple):
    """Tokens of a conversation that the policy did not sample.

    Attributes:
        sample: Id of the sample.
        turn: Turn that read the tokens.
        tokens: Token ids after the answer before it; the whole context for a first turn or a rewritten context.
        template: Token ids of the template, after an answer from the closing token on; empty if unknown.
        drawn: Sampled token that closed the answer; -1 if there is none.
        opens: True if that token opens the next message too, so it follows another one that closed the answer.
    """

    sample: int
    turn: int
    tokens: tuple[int, ...]
    template: tuple[int, ...]
    drawn: int = -1
    opens: bool = False

    @property
    def forms(self) -> list[tuple[int, ...]]:
        """Valid token ids; a header that closes an answer may follow another closing token."""
        whole, rest = self.template, self.template[1:]
        if self.drawn < 0:
            return [whole]
        return [rest, whole] if self.opens and self.drawn != whole[0] else [rest]


def unsampled_tokens(
    environments: Environments | None, conversations: Sequence[AuditedConversation], number: int
) -> list[Written]:
    """Return the tokens between the answers of a few conversations in messages, which differ between rollouts.

    None of programs, whose calls are not kept.
    """
    found = list[Written]()
    if environments is None or environments.tokenizer is None:
        return []
    programs = {name for name, factory in environments.factories.items() if isinstance(factory, Program)}
    spoken = [one for one in conversations if one.is_over and one.answers and one.environment not in programs]
    for conversation in sorted(spoken, key=lambda one: order_of(one.sample, number)):
        variables = own_variables(conversation.row, "a row")
        schemas = environments.schemas.get(conversation.environment) or variables.get(TOOLS, ())
        with suppress(BridgeError):
            found += _unsampled_tokens(conversation, environments.bridge(conversation.environment, variables), schemas)
        if len(found) >= MAX_WRITTEN:
            break
    return found


def _unsampled_tokens(conversation: AuditedConversation, bridge: Bridge, schemas: Sequence[Any]) -> Iterator[Written]:
    place, read, drawn, shown = 0, 0, (), 0
    for turn, (answer, (request, completion)) in enumerate(
        zip(conversation.places, conversation.turns, strict=True), 1
    ):
        messages, prefix = conversation.messages[place:answer], tuple(request.prefix_ids)
        pictures = () if request.media is None else request.media.pictures
        if turn == 1 or turn in conversation.rewrites:
            template = _with_placeholders(bridge, _context_ids(bridge, messages, schemas), pictures)
            yield Written(conversation.sample, request.turn, prefix, template)
        else:
            template = behind_an_answer(bridge, messages)
            closing = drawn[-1] if drawn and drawn[-1] in bridge.ends else -1
            opens = bridge.closes_as_head(template)
            template = _with_placeholders(bridge, template, pictures[shown:])
            yield Written(conversation.sample, request.turn, prefix[read:], template, closing, opens)
        place, read, drawn = answer + 1, len(prefix) + len(completion.token_ids), completion.token_ids
        shown = len(pictures)


def _with_placeholders(bridge: Bridge, ids: tuple[int, ...], pictures: Sequence[Pixels]) -> tuple[int, ...]:
    """Return token ids with all placeholders of pictures; as they are if they stand for other pictures."""
    processor = processor_of(bridge.tokenizer)
    if processor is not None and ids:
        with suppress(ValueError):
            return processor.expand(ids, pictures, "messages of the audit")[0]
    return ids


def _context_ids(bridge: Bridge, messages: Sequence[Message], schemas: Sequence[Any]) -> tuple[int, ...]:
    plain = [{name: part for name, part in message.items() if name != REWRITTEN} for message in messages]
    with suppress(Exception):  # a template may raise anything
        return tuple(_ids(bridge, plain, tools=list(schemas) or None))
    return ()


def behind_an_answer(bridge: Bridge, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the token ids of the template from the closing token of an answer on; empty if unknown."""
    if not messages:
        return ()
    for conversation, new in dummies(messages):
        try:
            one, other = (_ids(bridge, _with(mark, [*conversation, *new])) for mark in (MARK, OTHER))
        except Exception:  # noqa: BLE001  a template may raise anything; try another conversation
            continue
        if one != other:
            end = _common_end(one, other)
            for ids in (bridge.ends, control_tokens(bridge.tokenizer)):
                if closing := [place for place, token in enumerate(end) if token in ids]:
                    return tuple(end[closing[0] :])
            return ()
    return ()


def _with(words: str, value: Any, mark: str = MARK) -> Any:
    """Return nested values with the mark replaced by other words."""
    if isinstance(value, str):
        return value.replace(mark, words)
    if isinstance(value, Mapping):
        return {key: _with(words, part, mark) for key, part in value.items()}
    return [_with(words, part, mark) for part in value] if isinstance(value, list) else value


def _ids(bridge: Bridge, messages: Sequence[Any], **options: Any) -> list[int]:
    """Return the token ids of a conversation without control tokens in message texts.

    Without support in transformers, control tokens are removed from the texts, since no row may contain them.
    """
    safe = {"sanitize_control_tokens": True} if SANITIZES else {}
    conversation = list(messages)
    for token in () if SANITIZES else control_tokens(bridge.tokenizer).values():
        conversation = _with("", conversation, token)
    arguments: dict[str, Any] = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": False,
        **safe,
        **bridge.options,
        **options,
    }
    ids: Any = bridge.tokenizer.apply_chat_template(conversation, **{**arguments, **bridge.options})
    return list(ids)


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the longest common end of two lists."""
    alike = 0
    while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
        alike += 1
    return list(one[len(one) - alike :])
