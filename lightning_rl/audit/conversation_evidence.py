"""Conversations as rewards see them, together with the requests and completions of their turns."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_rl.audit.sampling_statistics import Pair, turns_of
from lightning_rl.corrections import Stat
from lightning_rl.distributed import Collectives
from lightning_rl.environments import Message, ToolEnvironment
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.environments.outcome import DEFAULT, REWARD_COLUMNS
from lightning_rl.environments.run_environments import Factory
from lightning_rl.generation import Completion
from lightning_rl.policy import Outputs
from lightning_rl.policy.processor import Pixels
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import FinishReason, Rollout, turn_numbers
from lightning_rl.testing.properties.definitions import population

CONVERSATION, ENVIRONMENT_REWARD = REWARD_COLUMNS
MAX_TOKENS = 16_384  # of the rows whose environment tokens are scored; longer ones are not scored
Rounds = Sequence[tuple[Rollout, Sequence[RewardCall]]]


class AuditedConversation(NamedTuple):
    """A conversation.

    Attributes:
        sample: Id of the sample.
        group: Id of the group.
        environment: Name of the environment.
        row: Row of the data.
        turns: Requests with their completions.
        messages: Messages as rewards see them.
        reward: Reward of the environment as rewards see it, or None.
        judged: Token ids that rewards score.
        finish: Reason for its end.
        rewrites: Turns, from 1, before which the context was rewritten, according to the row.
        pictures: Pictures of the row; those of the first request if the row is unknown.
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
    pictures: Sequence[Pixels] = ()

    @property
    def is_over(self) -> bool:
        """True if it ended regularly or at a limit, not by an abort or a failure."""
        return bool(self.turns) and self.finish in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURNS)

    @property
    def places(self) -> list[int]:
        """Places of its answers in ``messages``, which may begin with assistant messages of the prompt."""
        answers = [place for place, message in enumerate(self.messages) if is_answer(message)]
        return answers[-len(self.turns) :] if self.turns else []

    @property
    def answers(self) -> list[tuple[Message, Completion]]:
        """Message and completion of each turn; empty if messages are missing."""
        places = self.places
        if len(places) < len(self.turns):
            return []
        drawn = (completion for _, completion in self.turns)
        return [(self.messages[place], one) for place, one in zip(places, drawn, strict=True)]


def is_answer(message: Message) -> bool:
    """Return True if the policy wrote a message and no rewritten context repeats it."""
    return message.get("role") == "assistant" and not message.get(REWRITTEN)


def conversations_of(
    environment_names: Sequence[str], batches: Sequence[Sequence[Pair]], rounds: Rounds
) -> list[AuditedConversation]:
    """Return the conversations of all rounds of a rollout; empty without an environment."""
    if not environment_names:
        return []
    turns = turns_of(batches)
    return [
        conversation
        for rows, calls in rounds
        for conversation in _conversations_of_round(environment_names, turns, rows, calls)
    ]


def _conversations_of_round(
    names: Sequence[str], turns: Mapping[int, Sequence[Pair]], rows: Rollout, calls: Sequence[RewardCall]
) -> Iterator[AuditedConversation]:
    call = next((call for call in calls if len(call.prompts) == len(rows) and CONVERSATION in call.columns), None)
    if call is None:
        return
    samples, groups = rows.sample_ids.tolist(), rows.groups.tolist()
    numbers = turn_numbers(rows).cpu()
    for place, (sample, group, finish) in enumerate(zip(samples, groups, rows.finish.tolist(), strict=True)):
        columns = {name: values[place] for name, values in call.columns.items()}
        yield AuditedConversation(
            sample=sample,
            group=group,
            environment=names[0] if len(names) == 1 else str(columns.get(DEFAULT)),
            row={name: value for name, value in columns.items() if name not in REWARD_COLUMNS}
            | {"prompt": call.prompts[place]},
            turns=(pairs := turns.get(sample, ())),
            pictures=() if not pairs or (media := pairs[0][0].media) is None else media.pictures,
            messages=columns[CONVERSATION],
            reward=columns[ENVIRONMENT_REWARD],
            judged=tuple(call.completion_ids[place]),
            finish=FinishReason(finish),
            rewrites=frozenset((1 - numbers[place][numbers[place] < 0]).tolist()),
        )


def judged_otherwise(conversations: Sequence[AuditedConversation]) -> list[int]:
    """Return the ids of conversations of which rewards score other tokens than those of the last turn."""
    over = (conversation for conversation in conversations if conversation.is_over)
    return [
        conversation.sample
        for conversation in over
        if conversation.judged != tuple(conversation.turns[-1][1].token_ids)
    ]


def conversation_figures(
    conversations: Sequence[AuditedConversation], factories: Mapping[str, Factory], *, has_turns: bool = True
) -> dict[str, Stat]:
    """Return the statistics of a rollout's conversations by metric; those of turns if they are known."""
    names, figures = {conversation.environment for conversation in conversations}, dict[str, Stat]()
    for name in names & factories.keys():
        mine, head = (
            [conversation for conversation in conversations if conversation.environment == name],
            "env" if names == {DEFAULT} else f"env/{name}",
        )
        values = {
            f"{head}/{figure}": [float(count(conversation)) for conversation in mine]
            for figure, count in COUNTS.items()
            if has_turns or figure not in OF_TURNS
        }
        if _has_tools_alone(factories[name]) and all(conversation.is_over for conversation in mine):
            values[f"{head}/tool_calls"] = [float(_calls(conversation)) for conversation in mine]
        if rewards := [conversation.reward for conversation in mine if conversation.reward is not None]:
            values[f"{head}/reward"] = rewards
        figures |= {figure: population(torch.tensor(one, dtype=torch.float64)) for figure, one in values.items()}
    return figures


def _tokens(conversation: AuditedConversation) -> int:
    """Return the number of tokens that were read behind contexts before, with all tokens of a rewritten context.

    Of equal answers, one that no other answer continues is continued, behind which nothing was read before.
    """
    total, prefixes, open_answers = 0, list[tuple[int, ...]](), Counter[tuple[int, ...]]()
    answers = set[tuple[int, ...]]()
    for turn, (request, completion) in enumerate(conversation.turns, 1):
        prefix = request.prefix_ids
        known = [ids for ids in (*prefixes, *answers) if prefix[: len(ids)] == ids]
        answer = max((ids for ids in known if ids in answers), key=len, default=())
        before = answer if open_answers[answer] else max(known, key=len, default=())
        open_answers[answer] -= bool(open_answers[answer])
        total += len(prefix) - (0 if turn in conversation.rewrites else len(before)) if prefixes else 0
        prefixes.append(prefix)
        answers.add(whole := (*prefix, *completion.token_ids))
        open_answers[whole] += 1
    return total


def _calls(conversation: AuditedConversation) -> int:
    return sum(len(conversation.messages[place].get("tool_calls") or ()) for place in conversation.places)


COUNTS: Mapping[str, Callable[[AuditedConversation], int]] = {
    "turns": lambda conversation: len(conversation.turns),
    "tokens": _tokens,
    "failed": lambda conversation: conversation.finish is FinishReason.FAILED,
    "cut_by_turns": lambda conversation: conversation.finish is FinishReason.TURNS,
    "cut_by_tokens": lambda conversation: conversation.finish is FinishReason.LENGTH,
}
"""Metrics of every conversation."""
OF_TURNS = ("turns", "tokens")  # unknown of conversations from before a resume


def _has_tools_alone(factory: Factory) -> bool:
    """Return True if no code of the user logs metrics of tool calls."""
    return isinstance(factory, partial) and factory.func is ToolEnvironment


def words_logprob(
    score: Callable[[Rollout], Outputs | None], collectives: Collectives, rollout: Rollout
) -> float | None:
    """Return the mean log-probability of environment tokens in the first row of each group, in nats. A collective.

    None if there are no such tokens, if the rows are too long, or if the forward cannot be repeated.
    """
    groups = rollout.groups.tolist()
    first = torch.tensor([groups.index(group) for group in dict.fromkeys(groups)], dtype=torch.int64)
    rows = rollout.select(first.to(rollout.groups.device))
    inside = torch.arange(rows.width, device=rows.groups.device) < rows.response_lengths[:, None]
    words = inside & ~rows.action_mask & (turn_numbers(rows) >= 0)  # without rewritten contexts
    tokens = int((rows.prompt_lengths + rows.response_lengths).sum())
    if max(collectives.objects(tokens)) > MAX_TOKENS:
        return None
    outputs = score(rows.replace(valid_tokens=words, trained=rows.real))
    if outputs is None or not bool(words.any()):
        return None
    return float(outputs.logprobs[words].double().mean())
