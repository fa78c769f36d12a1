"""Lay out: from what an engine drew, turn by turn, to the rows of a rollout, with holes where an environment speaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rl.environments import ConversationRow, Turn
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
    rollout = Rollout.of_samples(
        [talk.prompt_ids for talk in talks],
        [talk.response_ids for talk in talks],
        groups=[drawn.group for drawn in rows],
        sample_ids=[drawn.sample_id for drawn in rows],
        finish=[drawn.finish for drawn in rows],
        dtype=dtype,
    )
    answers, numbers = [turn for talk in talks for turn in talk.turns], rollout.action_mask.long()
    if turns:
        numbers = pad_lists([talk.turn_numbers for talk in talks], torch.int64)[0]
    drawn = numbers > 0

    def spread(values: Tensor, fill: float = 0) -> Tensor:
        """One value for each drawn token, of all answers behind each other, [B, T]."""
        if len(values) != (number := int(drawn.sum())):
            raise ValueError(f"expected a value of each of {number} drawn tokens from the engine, got {len(values)}")
        return values.new_full(drawn.shape, fill).masked_scatter_(drawn, values)

    extras = {name: _pad(talks, name, _token_extra) for name in sorted(recorded)}
    if turns:
        extras |= {TURNS: numbers, TURN_REWARDS: spread(_turn_rewards(answers).to(dtype))}
    return rollout.replace(
        action_mask=drawn,
        valid_tokens=drawn,
        policy_version=spread(_versions(answers), -1),
        rollout_logprobs=spread(_logprobs(answers).to(dtype)) if logprobs else None,
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


def _versions(turns: Sequence[Turn]) -> Int[Tensor, " A"]:
    """Of each drawn token."""
    drawn = [turn.completion for turn in turns]
    if any(each.versions for each in drawn):
        versions = (each.versions or (each.version,) * len(each.token_ids) for each in drawn)
        return torch.tensor(list(chain.from_iterable(versions)), dtype=torch.int64)
    lengths = torch.tensor([len(each.token_ids) for each in drawn], dtype=torch.int64)
    return torch.tensor([each.version for each in drawn], dtype=torch.int64).repeat_interleave(lengths)


def _logprobs(turns: Sequence[Turn]) -> Float[Tensor, " A"]:
    """Of each drawn token."""
    known = [scores for turn in turns if (scores := turn.completion.logprobs) is not None]
    return torch.cat(known) if known else torch.zeros(0)


def _turn_rewards(turns: Sequence[Turn]) -> Float[Tensor, " A"]:
    """The reward of a turn at its last drawn token; 0 at the others."""
    values: list[float] = []
    for turn in turns:
        if turn.completion.token_ids:
            values += [*[0.0] * (len(turn.completion.token_ids) - 1), turn.reward or 0.0]
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
