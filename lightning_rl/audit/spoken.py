"""Spoken: answers of conversations in messages, and what was written behind each, beside what harmless words make.

The tokens between two answers are told by their control tokens alone: those that only a template may write. The same
messages with harmless content say which these are, so text of an environment that became one of them shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, NamedTuple

from lightning_rl.audit.draws import Pair, turns_of
from lightning_rl.environments import Bridge, BridgeError, Message
from lightning_rl.environments.bridge import control_tokens
from lightning_rl.environments.outcome import DEFAULT, REWARD_COLUMNS
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Finish

CONVERSATION, MAX_SEAMS = REWARD_COLUMNS[0], 24
HARMLESS = "x"


class SpokenTurn(NamedTuple):
    """An answer and what stands behind it.

    Attributes:
        sample: identity.
        turn: from 0.
        cut_off: whether the engine says that a limit of tokens ended it.
        calls: tool calls of it that the environment was given.
        closed: the token that ended it, if that ends answers; -1 for an answer that was cut off.
        written: control tokens behind it, up to the next answer; nothing behind the last one.
        harmless: those of the same messages with harmless content, from the token on that closes an answer; nothing
            where nobody looked.
        head: whether the first of these is the head of the next speaker too.
    """

    sample: int
    turn: int
    cut_off: bool
    calls: int
    closed: int = -1
    written: tuple[int, ...] = ()
    harmless: tuple[int, ...] = ()
    head: bool = False


class SpokenWatch:
    """Reads conversations from what rewards are told of them.

    Args:
        module: the run.
    """

    def __init__(self, module: RLLightningModule) -> None:
        self._module = module
        self._tails: dict[str, tuple[tuple[int, ...], bool]] = {}

    def turns(
        self,
        batches: Sequence[Sequence[Pair]],
        calls: Sequence[RewardCall],
        samples: Sequence[Sequence[int]],
        number: int,
    ) -> list[SpokenTurn]:
        """The turns of a rollout's conversations in messages; what was written behind some of them.

        Args:
            batches: what the engine was asked and returned.
            calls: of rewards.
            samples: that each of them was about.
            number: of the rollout, on which depends whose bridges are looked at.
        """
        talks = dict(self._talks(calls, samples)) if self._module.spoken_environments else {}
        turns = turns_of(batches)
        order = sorted(talks.keys() & turns.keys(), key=lambda sample: (sample * 0x9E3779B1 + number) % 2**32)
        found, seams = list[SpokenTurn](), 0
        for sample in order:
            for spoken in self._turns_of(sample, turns[sample], talks[sample], looks=seams < MAX_SEAMS):
                found.append(spoken)
                seams += bool(spoken.harmless)
        return found

    def _talks(
        self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Sequence[Message]]]:
        """The messages of each sample whose environment speaks in them."""
        names, spoken = self._module.environments, self._module.spoken_environments
        for call, ids in zip(calls, samples, strict=True):
            told = call.columns.get(CONVERSATION, ())
            column = call.columns.get(DEFAULT, ()) if len(names) > 1 else [next(iter(names))] * len(ids)
            for sample, messages, name in zip(ids, told, column, strict=False):
                if name in spoken and messages:
                    yield sample, messages

    def _turns_of(
        self, sample: int, turns: Sequence[Pair], messages: Sequence[Message], *, looks: bool
    ) -> Iterator[SpokenTurn]:
        """The turns of a conversation, whose answers are the last messages of the policy."""
        answers = [message.get("role") == "assistant" and not message.get("rewritten") for message in messages]
        places = [place for place, is_answer in enumerate(answers) if is_answer][-len(turns) :]
        if len(places) < len(turns):
            return
        bridge, between = self._bridge, [*pairwise(places), None]
        close = () if bridge is None else bridge.ends
        for (request, completion), following, place, ends in zip(
            turns, [*turns[1:], None], places, between, strict=True
        ):
            ids, calls = completion.token_ids, len(messages[place].get("tool_calls") or ())
            spoken = SpokenTurn(sample, request.turn, completion.finish is Finish.LENGTH, calls)
            whole = [*request.prefix_ids, *ids]
            if looks and ends is not None and following is not None and self._continues(following, whole):
                harmless, head = self._tail(messages[ends[0] + 1 : ends[1]])
                spoken = spoken._replace(
                    closed=ids[-1] if ids and ids[-1] in close else -1,
                    written=self._control_of(following[0].prefix_ids[len(whole) :]),
                    harmless=harmless,
                    head=head,
                )
            yield spoken

    @staticmethod
    def _continues(turn: Pair, whole: Sequence[int]) -> bool:
        return list(islice(turn[0].prefix_ids, len(whole))) == list(whole)

    def _control_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        tokenizer = self._module.tokenizer
        known: Mapping[int, Any] = {} if tokenizer is None else control_tokens(tokenizer)
        return tuple(token for token in ids if token in known)

    def _tail(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], bool]:
        """Control tokens from the one that closes an answer on, over such messages of harmless content, and whether
        that is the head of the next speaker.
        """
        kinds = [{**message, "content": HARMLESS} for message in messages]
        key, bridge = repr(kinds), self._bridge
        if key not in self._tails:
            self._tails[key] = (), False
            with suppress(BridgeError):
                ids = () if bridge is None else bridge.tail(kinds)
                self._tails[key] = self._control_of(ids), bool(ids and bridge and bridge.closes_as_head(ids))
        return self._tails[key]

    @property
    def _bridge(self) -> Bridge | None:
        tokenizer, close = self._module.tokenizer, frozenset(self._module.run.sampling.eos_token_ids or ())
        return None if tokenizer is None else Bridge(tokenizer, close, self._module.prompt_stream.template_options)
