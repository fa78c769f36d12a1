"""Seams: what stands between two answers, and what a context begins with, beside what the chat template writes there.

The template is asked anew, in another way than conversations ask it: two conversations that differ in an answer alone
end alike, and what follows the answer is in that end, from the first token on that closes an answer. So whatever goes
wrong between messages and tokens shows, one token of blanks included.
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

MAX_SEAMS = 16  # of an audit
MAX_CONTEXTS = 8
OTHER = "another answer, of other words!"  # in the place of the mark


class Seam(NamedTuple):
    """What stands between two answers of a conversation, in token ids.

    Attributes:
        sample: identity.
        turn: of the first of the two.
        drawn: the token that closed the answer; -1 if none did.
        written: behind the answer.
        template: what the template writes from the token on that closes an answer; nothing if it does not tell.
        opens: whether that token opens the next message too, so that it follows another one that closed the answer.
    """

    sample: int
    turn: int
    drawn: int
    written: tuple[int, ...]
    template: tuple[int, ...]
    opens: bool = False


class Context(NamedTuple):
    """What the policy read before the first answer of a conversation, or after its context was rewritten, in token ids.

    Attributes:
        sample: identity.
        turn: that it was read in.
        read: by the policy.
        template: what the template writes for the messages and the tools; nothing if it refuses them.
    """

    sample: int
    turn: int
    read: tuple[int, ...]
    template: tuple[int, ...]


def contexts_of(module: RLLightningModule, talks: Sequence[Talk], number: int) -> list[Context]:
    """With what some of a rollout's conversations in messages begin, and go on; others in every rollout.

    Args:
        module: the run.
        talks: its conversations.
        number: of the rollout.
    """
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
    """Some of the seams of a rollout's conversations in messages; of others in every rollout.

    Args:
        module: the run.
        talks: its conversations.
        number: of the rollout.
    """
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
    """Samples whose conversation ended for want of room where an answer had room behind what the environment said.

    Args:
        module: the run.
        talks: its conversations.
    """
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
            continue  # the environment would have gone on
        request, completion = talk.turns[-1]
        left = whole - sum(len(drawn.token_ids) for _, drawn in talk.turns)
        if talk.is_rewritten:
            left = 0  # how long the context would be that found no room is not known
        if left > 0 and length is not None and len(found) < MAX_SEAMS:
            new = talk.messages[talk.places[-1] + 1 :] if talk.places else ()
            said = () if bridge is None else behind_an_answer(bridge, new)
            left = min(left, length - len(request.prefix_ids) - len(completion.token_ids) - len(said)) if said else 0
        found += [talk.sample] if left > 0 else []
    return found


def _bridge_of(module: RLLightningModule) -> Bridge | None:
    """The template of a run's conversations; None if none of them can be in messages."""
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
            continue  # what is read from there on continues nothing
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
    """What the chat template writes from the token on that closes an answer, over messages that follow it; nothing if
    it does not tell.

    Args:
        bridge: whose template it is.
        messages: of users or tools.
    """
    if not messages:
        return ()
    for talk, new in dummies(messages):
        try:
            one, other = (_ids(bridge, _with(mark, [*talk, *new])) for mark in (MARK, OTHER))
        except Exception:  # noqa: BLE001  a template may raise anything, and then takes another conversation
            continue
        if one != other:
            end = _common_end(one, other)
            first = next((place for place, token in enumerate(end) if token in bridge.ends), len(end))
            return tuple(end[first:])
    return ()


def _with(words: str, value: Any, mark: str = MARK) -> Any:
    """Nested values with other words in the place of the mark."""
    if isinstance(value, str):
        return value.replace(mark, words)
    if isinstance(value, Mapping):
        return {key: _with(words, part, mark) for key, part in value.items()}
    return [_with(words, part, mark) for part in value] if isinstance(value, list) else value


def _ids(bridge: Bridge, messages: Sequence[Any], **options: Any) -> list[int]:
    """A conversation as ids, in which no text of a message is a control token: where transformers cannot write one as
    plain text, it is left out, since no row may hold it.
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
    """The longest end of two lists that is the same."""
    alike = 0
    while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
        alike += 1
    return list(one[len(one) - alike :])
