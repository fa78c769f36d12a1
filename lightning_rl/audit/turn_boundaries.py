"""Tokens between two answers and at the beginning of contexts, compared with those of the chat template.

Two conversations that differ only in an answer are rendered. Their common end contains the tokens after the answer,
from the token that closes it. This is independent of the rendering in the run, so it detects any difference between
messages and tokens, such as a single space.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_rl.audit.conversation_evidence import Talk
from lightning_rl.audit.subsample import order_of
from lightning_rl.environments import Bridge, BridgeError, Message
from lightning_rl.environments.chat_template import MARK, SANITIZES, control_tokens, dummies
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import FinishReason

MAX_SEAMS = 16  # per audit
MAX_CONTEXTS = 8
OTHER = "another answer, of other words!"  # replaces the mark


class Seam(NamedTuple):
    """Tokens between two answers of a conversation.

    Attributes:
        sample: Id of the sample.
        turn: Turn of the first answer.
        drawn: Sampled token that closed the answer; -1 if there is none.
        written: Token ids after the answer.
        template: Token ids of the template from the closing token on; empty if unknown.
        opens: True if that token opens the next message too, so it follows another one that closed the answer.
    """

    sample: int
    turn: int
    drawn: int
    written: tuple[int, ...]
    template: tuple[int, ...]
    opens: bool = False


class Context(NamedTuple):
    """Tokens that the policy read before the first answer, or after its context was rewritten.

    Attributes:
        sample: Id of the sample.
        turn: Turn that read the context.
        read: Token ids that the policy read.
        template: Token ids of the template for the messages and tools; empty if it raises.
    """

    sample: int
    turn: int
    read: tuple[int, ...]
    template: tuple[int, ...]


def contexts_of(module: RLLightningModule, talks: Sequence[Talk], number: int) -> list[Context]:
    """Return the contexts of a few conversations in messages, which differ between rollouts."""
    found, bridge, conversations = list[Context](), _bridge_of(module), module.sampler.environments
    if bridge is None or conversations is None:
        return []
    spoken = [talk for talk in talks if talk.is_over and talk.answers]
    for talk in sorted(spoken, key=lambda one: order_of(one.sample, number)):
        schemas, before = conversations.schemas.get(talk.environment, ()), 0
        for turn, (place, (request, _)) in enumerate(zip(talk.places, talk.turns, strict=True), 1):
            said, before = talk.messages[before:place], place + 1
            if turn == 1 or turn in talk.rewrites:
                template = _context_ids(bridge, said, schemas)
                found.append(Context(talk.sample, request.turn, tuple(request.prefix_ids), template))
        if len(found) >= MAX_CONTEXTS:
            break
    return found


def _context_ids(bridge: Bridge, messages: Sequence[Message], schemas: Sequence[Any]) -> tuple[int, ...]:
    plain = [{name: part for name, part in message.items() if name != REWRITTEN} for message in messages]
    with suppress(Exception):  # a template may raise anything
        return tuple(_ids(bridge, plain, tools=list(schemas) or None))
    return ()


def seams_of(module: RLLightningModule, talks: Sequence[Talk], number: int) -> list[Seam]:
    """Return the seams of a few conversations in messages, which differ between rollouts."""
    found, bridge = list[Seam](), _bridge_of(module)
    if bridge is None:
        return []
    spoken = [talk for talk in talks if talk.is_over and talk.answers]
    for talk in sorted(spoken, key=lambda one: order_of(one.sample, number)):
        found += _seams_of_talk(talk, bridge)
        if len(found) >= MAX_SEAMS:
            break
    return found


def early_ends(module: RLLightningModule, talks: Sequence[Talk]) -> list[int]:
    """Return ids of samples that ended at a length limit although another answer would have fitted."""
    conversations, bridge, found = module.sampler.environments, _bridge_of(module), list[int]()
    if conversations is None:
        return []
    whole, length = module.run.sampling.max_new_tokens, conversations.limits.length
    for talk in talks:
        if (
            not talk.is_over
            or talk.finish is not FinishReason.LENGTH
            or talk.turns[-1][1].finish is not FinishReason.STOP
        ):
            continue  # the environment would have continued
        request, completion = talk.turns[-1]
        left = whole - sum(len(drawn.token_ids) for _, drawn in talk.turns)
        if talk.is_rewritten:
            left = 0  # the length of the context that did not fit is unknown
        if left > 0 and length is not None and len(found) < MAX_SEAMS:
            new = talk.messages[talk.places[-1] + 1 :] if talk.places else ()
            said = () if bridge is None else behind_an_answer(bridge, new)
            left = min(left, length - len(request.prefix_ids) - len(completion.token_ids) - len(said)) if said else 0
        found += [talk.sample] if left > 0 else []
    return found


def _bridge_of(module: RLLightningModule) -> Bridge | None:
    """Return the chat template of the conversations; None if none of them uses messages."""
    conversations = module.sampler.environments
    if conversations is None or conversations.tokenizer is None:
        return None
    with suppress(BridgeError):
        return Bridge(conversations.tokenizer, conversations.close, conversations.template_options)
    return None


def _seams_of_talk(talk: Talk, bridge: Bridge) -> Iterator[Seam]:
    for (one, other), ((request, completion), (following, _)) in zip(
        pairwise(talk.places), pairwise(talk.turns), strict=True
    ):
        end, drawn = len(request.prefix_ids) + len(completion.token_ids), completion.token_ids
        if any(message.get(REWRITTEN) for message in talk.messages[one + 1 : other]):
            continue  # a rewritten context does not continue the previous tokens
        template = behind_an_answer(bridge, talk.messages[one + 1 : other])
        yield Seam(
            sample=talk.sample,
            turn=request.turn,
            drawn=drawn[-1] if drawn and drawn[-1] in bridge.ends else -1,
            written=tuple(following.prefix_ids[end:]),
            template=template,
            opens=bridge.closes_as_head(template),
        )


def behind_an_answer(bridge: Bridge, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the token ids of the template from the closing token of an answer on; empty if unknown."""
    if not messages:
        return ()
    for talk, new in dummies(messages):
        try:
            one, other = (_ids(bridge, _with(mark, [*talk, *new])) for mark in (MARK, OTHER))
        except Exception:  # noqa: BLE001  a template may raise anything; try another conversation
            continue
        if one != other:
            end = _common_end(one, other)
            first = next((place for place, token in enumerate(end) if token in bridge.ends), len(end))
            return tuple(end[first:])
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
    talk = list(messages)
    for token in () if SANITIZES else control_tokens(bridge.tokenizer).values():
        talk = _with("", talk, token)
    arguments = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": False,
        **safe,
        **bridge.options,
        **options,
    }
    ids: Any = bridge.tokenizer.apply_chat_template(talk, **{**arguments, **bridge.options})
    return list(ids)


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the longest common end of two lists."""
    alike = 0
    while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
        alike += 1
    return list(one[len(one) - alike :])
