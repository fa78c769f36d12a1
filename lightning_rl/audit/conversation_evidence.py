"""Talks: conversations as rewards were told of them, beside what the engine was asked turn by turn."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.audit.sampling_statistics import Pair, turns_of
from lightning_rl.environments import Message
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.environments.outcome import DEFAULT, REWARD_COLUMNS
from lightning_rl.generation import Completion
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import TURNS, FinishReason, Rollout

CONVERSATION, ENVIRONMENT_REWARD = REWARD_COLUMNS
Rounds = Sequence[tuple[Rollout, Sequence[RewardCall]]]


class Talk(NamedTuple):
    """A conversation.

    Attributes:
        sample: identity.
        group: which prompt it is about.
        environment: its name.
        row: of the data.
        turns: what the engine was asked and returned.
        messages: as rewards were told.
        reward: that its environment gave, as rewards were told; None for nothing.
        judged: the token ids that rewards judge it by.
        finish: why it ended.
        rewrites: the turns, from 1, before which its context was rewritten, as its row says.
    """

    sample: int
    group: int
    environment: str
    row: Mapping[str, Any]
    turns: Sequence[Pair]
    messages: Sequence[Message]
    reward: float | None
    judged: tuple[int, ...]
    finish: FinishReason
    rewrites: frozenset[int] = frozenset()

    @property
    def is_over(self) -> bool:
        """Whether it came to an end of its own or to a limit, and neither engine nor environment gave it up."""
        return bool(self.turns) and self.finish in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURNS)

    @property
    def places(self) -> list[int]:
        """Where the answers of its turns stand among the messages, which may begin with others of the policy."""
        said = [place for place, message in enumerate(self.messages) if is_answer(message)]
        return said[-len(self.turns) :] if self.turns else []

    @property
    def is_rewritten(self) -> bool:
        """Whether its context was rewritten on the way, also where no answer came after."""
        return bool(self.rewrites) or any(message.get(REWRITTEN) for message in self.messages)

    @property
    def answers(self) -> list[tuple[Message, Completion]]:
        """The message of each turn, with what was drawn; none where messages are missing."""
        places = self.places
        if len(places) < len(self.turns):
            return []
        drawn = (completion for _, completion in self.turns)
        return [(self.messages[place], one) for place, one in zip(places, drawn, strict=True)]


def is_answer(message: Message) -> bool:
    """Whether the policy said it there, and no rewritten context repeats it."""
    return message.get("role") == "assistant" and not message.get(REWRITTEN)


class Told(NamedTuple):
    """What rewards are told of a conversation, in plain values.

    Attributes:
        sample: identity.
        turns: that the engine drew.
        answers: of the policy among the messages; -1 for an environment in token ids.
        judges_last: whether the token ids that it is judged by are those of its last turn.
        cut_early: whether it ended for want of room while there was some.
        calls_when_cut: whether tool calls were read in an answer of it that a limit of tokens cut off.
    """

    sample: int
    turns: int
    answers: int
    judges_last: bool
    cut_early: bool = False
    calls_when_cut: bool = False


def talks_of(module: RLLightningModule, batches: Sequence[Sequence[Pair]], rounds: Rounds) -> list[Talk]:
    """The conversations of a rollout, of all of its rounds; none without an environment.

    Args:
        module: the run.
        batches: what the engine was asked and returned.
        rounds: rows with the calls of rewards about them.
    """
    if not module.environments:
        return []
    turns = turns_of(batches)
    return [talk for rows, calls in rounds for talk in _talks_of_round(module, turns, rows, calls)]


def _talks_of_round(
    module: RLLightningModule, turns: Mapping[int, Sequence[Pair]], rows: Rollout, calls: Sequence[RewardCall]
) -> Iterator[Talk]:
    call = next((call for call in calls if len(call.prompts) == len(rows) and CONVERSATION in call.columns), None)
    if call is None:
        return
    names, samples, groups = list(module.environments), rows.sample_ids.tolist(), rows.groups.tolist()
    numbers = rows.token_extras[TURNS].cpu()
    for place, (sample, group, finish) in enumerate(zip(samples, groups, rows.finish.tolist(), strict=True)):
        columns = {name: values[place] for name, values in call.columns.items()}
        yield Talk(
            sample=sample,
            group=group,
            environment=names[0] if len(names) == 1 else str(columns.get(DEFAULT)),
            row={name: value for name, value in columns.items() if name not in REWARD_COLUMNS}
            | {"prompt": call.prompts[place]},
            turns=turns.get(sample, ()),
            messages=columns[CONVERSATION],
            reward=columns[ENVIRONMENT_REWARD],
            judged=tuple(call.completion_ids[place]),
            finish=FinishReason(finish),
            rewrites=frozenset((1 - numbers[place][numbers[place] < 0]).tolist()),
        )


def accounts_of(talks: Sequence[Talk], early: Collection[int] = ()) -> list[Told]:
    """What rewards are told of conversations that came to an end.

    Args:
        talks: conversations.
        early: samples that ended for want of room while there was some.
    """
    return [
        Told(
            sample=talk.sample,
            turns=len(talk.turns),
            answers=sum(map(is_answer, talk.messages)) if talk.messages else -1,
            judges_last=talk.judged == tuple(talk.turns[-1][1].token_ids),
            cut_early=talk.sample in early,
            calls_when_cut=any(
                bool(message.get("tool_calls")) and drawn.finish is FinishReason.LENGTH
                for message, drawn in talk.answers
            ),
        )
        for talk in talks
        if talk.is_over
    ]
