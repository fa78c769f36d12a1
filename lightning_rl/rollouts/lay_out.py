"""Lay out: from what an engine drew, turn by turn, to the rows of a rollout, with holes where an environment speaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.environments import ConversationRow
from lightning_rl.rollout import ROUTES, TURN_REWARDS, TURNS, Finish, Rollout, pad_lists, pad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRow:
    """A row before it is a tensor.

    Args:
        row: its turns.
        group: which prompt it answers.
        sample_id: its identity.
        finish: why it ended.
    """

    row: ConversationRow
    group: int
    sample_id: int
    finish: Finish


def lay_out(
    rows: Sequence[DrawnRow], *, dtype: torch.dtype, recorded: frozenset[str], logprobs: bool, turns: bool
) -> Rollout:
    """Rows without rewards: a token is an action if the policy drew it, and has a log-probability and a version then.

    Args:
        rows: of this rank.
        dtype: of rewards and log-probabilities.
        recorded: what completions carry about their tokens.
        logprobs: whether they carry log-probabilities.
        turns: whether rows say which turn drew each token, and what it was rewarded with.

    Raises:
        ValueError: if a completion lacks what its engine promised.
    """
    talks = [drawn.row for drawn in rows]
    numbers = [talk.turn_numbers for talk in talks] if turns else []
    rollout = Rollout.of_samples(
        [talk.prompt_ids for talk in talks],
        [talk.response_ids for talk in talks],
        groups=[drawn.group for drawn in rows],
        sample_ids=[drawn.sample_id for drawn in rows],
        finish=[drawn.finish for drawn in rows],
        versions=[_versions(talk) for talk in talks],
        actions=[[number > 0 for number in row] for row in numbers] if turns else None,
        dtype=dtype,
    )
    extras = {name: _pad(talks, name, _token_extra) for name in sorted(recorded)}
    if turns:
        extras[TURNS] = pad_lists(numbers, torch.int64)[0]
        extras[TURN_REWARDS] = pad_rows([_turn_rewards(talk) for talk in talks], dtype)[0]
    return rollout.replace(
        rollout_logprobs=pad_rows([_logprobs(talk) for talk in talks], dtype)[0] if logprobs else None,
        token_extras=extras,
        prompt_extras={name: _pad(talks, name, _prompt_extra) for name in sorted(recorded & {ROUTES})},
    )


def _pad(
    talks: Sequence[ConversationRow], name: str, extra_of: Callable[[ConversationRow, str], Tensor | None]
) -> Tensor:
    """One extra of all rows, 0 where nothing is known; rows without a turn know not even its shape."""
    values = [extra_of(talk, name) for talk in talks]
    known = next((value for value in values if value is not None), torch.zeros(0, dtype=torch.uint8))
    empty = known.new_zeros(0, *known.shape[1:])
    return pad_rows([empty if value is None else value for value in values], known.dtype)[0]


def _versions(talk: ConversationRow) -> list[int]:
    versions: list[int] = []
    for turn in talk.turns:
        drawn = turn.completion
        versions += [*(drawn.versions or (drawn.version,) * len(drawn.token_ids)), *[-1] * len(turn.reply)]
    return versions


def _logprobs(talk: ConversationRow) -> Tensor:
    """0 where the environment speaks."""
    if len(talk.turns) == 1 and not talk.turns[0].reply and (alone := talk.turns[0].completion.logprobs) is not None:
        return alone
    parts = [torch.zeros(0)]
    for turn in talk.turns:
        drawn = turn.completion.logprobs
        parts += [torch.zeros(0) if drawn is None else drawn, torch.zeros(len(turn.reply))]
    return torch.cat(parts)


def _turn_rewards(talk: ConversationRow) -> Tensor:
    """The reward of a turn at its last drawn token; 0 elsewhere."""
    values: list[float] = []
    for turn in talk.turns:
        drawn = [0.0] * len(turn.completion.token_ids)
        if drawn and turn.reward is not None:
            drawn[-1] = turn.reward
        values += [*drawn, *[0.0] * len(turn.reply)]
    return torch.tensor(values)


def _token_extra(talk: ConversationRow, name: str) -> Tensor | None:
    """What is known about each token of the response: of the environment's, what the next turn says of its prompt.

    The last token of an answer is read in the next turn too, unless the context is rewritten.
    """
    parts: list[Tensor] = []
    for turn, following in zip(talk.turns, [*talk.turns[1:], None], strict=True):
        drawn = _extra(turn.completion.token_extras, name, len(turn.completion.token_ids))
        reply = drawn.new_zeros(len(turn.reply), *drawn.shape[1:])
        if following is not None and name in following.completion.prompt_extras:
            read = following.completion.prompt_extras[name]
            begin = len(following.request.prefix_ids) - len(turn.reply)
            reply = read[begin:]
            if not turn.rewrites and len(drawn):
                drawn = torch.cat([drawn[:-1], read[begin - 1 : begin]])
        parts += [drawn, reply]
    return torch.cat(parts) if parts else None


def _prompt_extra(talk: ConversationRow, name: str) -> Tensor | None:
    if not talk.turns:
        return None
    return _extra(talk.turns[0].completion.prompt_extras, name, len(talk.prompt_ids))


def _extra(extras: Mapping[str, Tensor], name: str, length: int) -> Tensor:
    if name not in extras or len(extras[name]) != length:
        got = "nothing" if name not in extras else len(extras[name])
        raise ValueError(f"expected {name} of each of {length} tokens from the engine, got {got}")
    return extras[name]
