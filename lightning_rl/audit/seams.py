"""Seams: what stands between two answers, beside what the chat template writes around the messages that stand there.

The template is asked anew, in another way than conversations ask it: two conversations that differ in an answer alone
end alike, and what follows the answer is in that end, from the first token on that closes an answer. So whatever goes
wrong between messages and tokens shows, one token of blanks included.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lightning_rl.audit.talks import Talk
from lightning_rl.environments import Message
from lightning_rl.environments.bridge import MARK, SANITIZES, dummies
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Finish

MAX_SEAMS = 16  # of an audit
OTHER = "another answer, of other words!"  # in the place of the mark


class Seam(NamedTuple):
    """What stands between two answers of a conversation, in token ids.

    Attributes:
        sample: identity.
        turn: of the first of the two.
        drawn: the token that ended the answer, if it ends answers; -1 for one that was cut off.
        written: behind the answer.
        template: what the template writes from the token on that closes an answer; nothing if it does not tell.
    """

    sample: int
    turn: int
    drawn: int
    written: tuple[int, ...]
    template: tuple[int, ...]


def seams_of(module: RLLightningModule, talks: Sequence[Talk], number: int) -> list[Seam]:
    """Some of the seams of a rollout's conversations in messages; of others in every rollout.

    Args:
        module: the run.
        talks: its conversations.
        number: of the rollout.
    """
    conversations, found = module.sampler.environments, list[Seam]()
    if conversations is None or conversations.tokenizer is None:
        return []
    spoken = [talk for talk in talks if talk.is_over and talk.messages and len(talk.places) == len(talk.turns)]
    for talk in sorted(spoken, key=lambda one: order_of(one.sample, number)):
        found += _seams_of_talk(talk, conversations.tokenizer, conversations.close, conversations.template_options)
        if len(found) >= MAX_SEAMS:
            break
    return found


def early_ends(module: RLLightningModule, talks: Sequence[Talk]) -> list[int]:
    """Samples whose conversation ended for want of room where an answer had room behind what the environment said.

    Args:
        module: the run.
        talks: its conversations.
    """
    conversations, found = module.sampler.environments, list[int]()
    if conversations is None or conversations.tokenizer is None:
        return []
    whole, length = module.run.sampling.max_new_tokens, conversations.limits.length
    for talk in talks:
        if not talk.is_over or talk.finish is not Finish.LENGTH or talk.turns[-1][1].finish is not Finish.STOP:
            continue  # the environment would have gone on
        request, completion = talk.turns[-1]
        left = whole - sum(len(drawn.token_ids) for _, drawn in talk.turns)
        if talk.is_rewritten:
            left = 0  # how long the context would be that found no room is not known
        if left > 0 and length is not None and len(found) < MAX_SEAMS:
            new = talk.messages[talk.places[-1] + 1 :] if talk.places else ()
            said = behind_an_answer(conversations.tokenizer, conversations.close, conversations.template_options, new)
            left = min(left, length - len(request.prefix_ids) - len(completion.token_ids) - len(said)) if said else 0
        found += [talk.sample] if left > 0 else []
    return found


def order_of(sample: int, number: int) -> int:
    """A number that puts samples into an order that has nothing to do with what they say, another in each rollout."""
    return (sample * 0x9E3779B1 + number * 0x85EBCA6B) % 2**32


def _seams_of_talk(
    talk: Talk, tokenizer: PreTrainedTokenizerBase, close: Collection[int], options: Mapping[str, Any]
) -> Iterator[Seam]:
    for (one, other), ((request, completion), (following, _)) in zip(
        pairwise(talk.places), pairwise(talk.turns), strict=True
    ):
        end, drawn = len(request.prefix_ids) + len(completion.token_ids), completion.token_ids
        if any(message.get(REWRITTEN) for message in talk.messages[one + 1 : other]):
            continue  # what is read from there on continues nothing
        yield Seam(
            sample=talk.sample,
            turn=request.turn,
            drawn=drawn[-1] if drawn and drawn[-1] in close else -1,
            written=tuple(following.prefix_ids[end:]),
            template=behind_an_answer(tokenizer, close, options, talk.messages[one + 1 : other]),
        )


def behind_an_answer(
    tokenizer: PreTrainedTokenizerBase,
    close: Collection[int],
    options: Mapping[str, Any],
    messages: Sequence[Message],
) -> tuple[int, ...]:
    """What the chat template writes from the token on that closes an answer, over messages that follow it; nothing if
    it does not tell.

    Args:
        tokenizer: with a chat template.
        close: ids that end an answer.
        options: further arguments of the template.
        messages: of users or tools.
    """
    if not messages:
        return ()
    for talk, new in dummies(messages):
        try:
            one, other = (_ids(tokenizer, options, _with(mark, [*talk, *new])) for mark in (MARK, OTHER))
        except Exception:  # noqa: BLE001  a template may raise anything, and then takes another conversation
            continue
        if one != other:
            end = _common_end(one, other)
            first = next((place for place, token in enumerate(end) if token in close), len(end))
            return tuple(end[first:])
    return ()


def _with(words: str, value: Any) -> Any:
    """Nested values with other words in the place of the mark."""
    if isinstance(value, str):
        return value.replace(MARK, words)
    if isinstance(value, Mapping):
        return {key: _with(words, part) for key, part in value.items()}
    return [_with(words, part) for part in value] if isinstance(value, list) else value


def _ids(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], messages: Sequence[Any]) -> list[int]:
    safe = {"sanitize_control_tokens": True} if SANITIZES else {}
    arguments = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **safe, **options}
    ids: Any = tokenizer.apply_chat_template(list(messages), **arguments)
    return list(ids)


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The longest end of two lists that is the same."""
    alike = 0
    while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
        alike += 1
    return list(one[len(one) - alike :])
