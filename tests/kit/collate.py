"""Rows of a rollout from conversations, by a second way than `Rollout.of`; tests compare the two."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rl.fields import Ragged
from lightning_rl.generation import Completion, Request
from lightning_rl.rollout import ROUTES, TURN_REWARDS, FinishReason, Rollout, pad_lists, pad_rows


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer of the policy and the environment's reply, which may be the whole prefix of the next turn."""

    request: Request
    completion: Completion
    reply: tuple[int, ...] = ()
    rewrites: bool = False
    reward: float | None = None


@dataclass(frozen=True, kw_only=True)
class ConversationRow:
    """The turns of a row behind the prefix of the first one."""

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Token ids after the prompt."""
        return tuple(token for turn in self.turns for token in (*turn.completion.token_ids, *turn.reply))

    @property
    def turn_numbers(self) -> tuple[int, ...]:
        """Turn of each response token, from 1; 0 for replies, minus the previous turn for a rewritten prefix."""
        numbers: list[int] = []
        for turn in self.turns:
            number = turn.request.turn + 1
            numbers += [number] * len(turn.completion.token_ids)
            numbers += [-number if turn.rewrites else 0] * len(turn.reply)
        return tuple(numbers)


def lay_out(
    rows: Sequence[ConversationRow],
    *,
    groups: Sequence[int],
    sample_ids: Sequence[int],
    finish: Sequence[FinishReason],
    dtype: torch.dtype,
    recorded: frozenset[str],
    logprobs: bool,
    turns: bool,
) -> Rollout:
    """Return a rollout without rewards; only tokens that the policy sampled are actions and have a log-probability.

    Args:
        rows: Turns of each row of this rank.
        groups: Prompt index of each row.
        sample_ids: Id of each row.
        finish: Finish reason of each row.
        dtype: Dtype of log-probabilities; rewards are in float64.
        recorded: Names of the per-token extras that completions hold.
        logprobs: True if completions hold log-probabilities.
        turns: True to store the turn number and the turn reward of each token.

    Raises:
        ValueError: If a completion lacks values that its engine promised.
    """
    prompts, responses = [row.prompt_ids for row in rows], [row.response_ids for row in rows]
    rollout = Rollout.of_samples(prompts, responses, groups=groups, sample_ids=sample_ids, finish=finish)
    answers, numbers = [turn for row in rows for turn in row.turns], rollout.action_mask.long()
    if turns:
        numbers = pad_lists([row.turn_numbers for row in rows], torch.int64)[0]
    drawn = numbers > 0

    def spread(values: Tensor, fill: float = 0) -> Tensor:
        """Scatter one value per sampled token, concatenated over completions, to ``[B, T]``."""
        if len(values) != (number := int(drawn.sum())):
            raise ValueError(f"expected a value for each of {number} sampled tokens from the engine, got {len(values)}")
        return values.new_full(drawn.shape, fill).masked_scatter_(drawn, values)

    extras = {name: _pad(rows, name, _token_extra) for name in sorted(recorded)}
    if turns:
        extras |= {TURN_REWARDS: spread(_turn_rewards(answers))}
        trees = [_tree(row) for row in rows]
        values = torch.tensor(list(chain.from_iterable(trees)), dtype=torch.int64).reshape(-1, 3)
        rollout = rollout.replace(
            segments=Ragged(values, torch.tensor([len(tree) for tree in trees], dtype=torch.int64))
        )
    return rollout.replace(
        action_mask=drawn,
        valid_tokens=drawn,
        policy_version=spread(_versions(answers), -1),
        rollout_logprobs=spread(_logprobs(answers).to(dtype)) if logprobs else None,
        token_extras=extras,
        prompt_extras={name: _pad(rows, name, _prompt_extra) for name in sorted(recorded & {ROUTES})},
    )


def _tree(row: ConversationRow) -> list[tuple[int, int, int]]:
    """Position, parent and turn of each answer and of each reply."""
    tree, begin, parent = list[tuple[int, int, int]](), 0, -1
    for number, turn in enumerate(row.turns, 1):
        tree.append((begin, parent, number))
        begin, parent = begin + len(turn.completion.token_ids), len(tree) - 1
        if turn.reply:
            tree.append((begin, -2 if turn.rewrites else parent, -number if turn.rewrites else 0))
            begin, parent = begin + len(turn.reply), len(tree) - 1
    return tree


def _pad(
    rows: Sequence[ConversationRow], name: str, extra_of: Callable[[ConversationRow, str], Tensor | None]
) -> Tensor:
    """Pad one extra of all rows to a tensor, with 0 where a row lacks it."""
    values = [extra_of(row, name) for row in rows]
    known = next((value for value in values if value is not None), torch.zeros(0, dtype=torch.uint8))
    empty = known.new_zeros(0, *known.shape[1:])
    return pad_rows([empty if value is None else value for value in values], known.dtype)[0]


def _versions(turns: Sequence[Turn]) -> Int[Tensor, " A"]:
    """Return the policy version of each sampled token."""
    drawn = [turn.completion for turn in turns]
    if any(each.versions for each in drawn):
        versions = (each.versions or (each.version,) * len(each.token_ids) for each in drawn)
        return torch.tensor(list(chain.from_iterable(versions)), dtype=torch.int64)
    lengths = torch.tensor([len(each.token_ids) for each in drawn], dtype=torch.int64)
    return torch.tensor([each.version for each in drawn], dtype=torch.int64).repeat_interleave(lengths)


def _logprobs(turns: Sequence[Turn]) -> Float[Tensor, " A"]:
    """Return the log-probability of each sampled token."""
    known = [scores for turn in turns if (scores := turn.completion.logprobs) is not None]
    return torch.cat(known) if known else torch.zeros(0)


def _turn_rewards(turns: Sequence[Turn]) -> Float[Tensor, " A"]:
    """Return the reward of each turn at its last sampled token, and 0 at the others."""
    values: list[float] = []
    for turn in turns:
        if turn.completion.token_ids:
            values += [*[0.0] * (len(turn.completion.token_ids) - 1), turn.reward or 0.0]
    return torch.tensor(values, dtype=torch.float64)


def _token_extra(row: ConversationRow, name: str) -> Tensor | None:
    """Return one extra of each response token; tokens of the environment take theirs from the prompt of the next turn.

    So does the last token of a completion, which is an input only in the next turn, unless the context is rewritten.
    """
    parts: list[Tensor] = []
    for turn, following in zip_longest(row.turns, row.turns[1:]):
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


def _prompt_extra(row: ConversationRow, name: str) -> Tensor | None:
    if not row.turns:
        return None
    return _extra(row.turns[0].completion.prompt_extras, name, len(row.prompt_ids))


def _extra(extras: Mapping[str, Tensor], name: str, length: int) -> Tensor:
    if name not in extras or len(extras[name]) != length:
        got = "nothing" if name not in extras else len(extras[name])
        raise ValueError(f"expected {name} for each of {length} tokens from the engine, got {got}")
    return extras[name]
