"""Plan of the rows that train together, made once per rollout and used by every pass over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rl.policy.packing import Layout, pack, sequences_of
from lightning_rl.rollout import Rollout
from lightning_rl.utils.device import to_device

RowLists = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that go through the model together. An empty index is padding, for ranks with fewer microbatches."""

    index: Int[Tensor, " b"]
    layout: Layout

    def to(self, device: torch.device | str) -> "Microbatch":
        """Move index and layout to ``device``."""
        return Microbatch(to_device(self.index, device), self.layout.to(device))

    def rows_of(self, rollout: Rollout) -> Rollout:
        """Return the microbatch's rows with every field, cut to its longest response."""
        if not len(self.index):
            return rollout.padding_rows(1).fit_width(self.layout.shape[1])
        return rollout.select(self.index, width=self.layout.shape[1])


@dataclass(frozen=True, slots=True)
class Plan:
    """Microbatches of each minibatch. One minibatch is one optimizer step; epochs repeat them in the same order."""

    minibatches: tuple[tuple[Microbatch, ...], ...]

    def step(self, number: int) -> tuple[Microbatch, ...]:
        """Return the microbatches of optimizer step ``number`` of the rollout, counted from 0 through all epochs."""
        return self.minibatches[number % len(self.minibatches)]

    def tokens(self, number: int) -> int:
        """Return the number of tokens that this rank trains on in optimizer step ``number``."""
        return sum(len(microbatch.layout.targets) for microbatch in self.step(number))

    def to(self, device: torch.device | str) -> "Plan":
        """Move every layout to ``device``."""
        return Plan(tuple(tuple(microbatch.to(device) for microbatch in step) for step in self.minibatches))

    def microbatches(self) -> list[Microbatch]:
        """Return every microbatch once."""
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]

    def rows(self) -> RowLists:
        """Return row indices as lists, from which :func:`plan_of_rows` makes the same plan."""
        return [[microbatch.index.tolist() for microbatch in minibatch] for minibatch in self.minibatches]


def make_plan(
    rollout: Rollout,
    *,
    minibatches: int,
    max_tokens_per_microbatch: int,
    packed: bool = True,
    max_over_ranks: Callable[[Sequence[int]], list[int]] = list,
) -> Plan:
    """Split the trained rows into minibatches of whole groups, and these into microbatches of similar lengths.

    Args:
        rollout: Rollout on the CPU; rows outside ``trained`` are left out.
        minibatches: Optimizer steps per epoch.
        max_tokens_per_microbatch: Maximum tokens of a microbatch, padding included; a longer row gets its own.
        packed: False for padding on the right.
        max_over_ranks: Function for the element-wise maximum over ranks, so that all have equally many microbatches.
    """
    sizes = _sizes(rollout, packed=packed)
    groups = list(dict.fromkeys(rollout.groups[rollout.trained].tolist()))
    share, rest = divmod(len(groups), minibatches)
    plan: RowLists = []
    for number in range(minibatches):
        first = number * share + min(number, rest)
        chosen = torch.tensor(groups[first : first + share + (number < rest)], dtype=torch.int64)
        rows = (rollout.trained & torch.isin(rollout.groups, chosen)).nonzero()[:, 0]
        plan.append(_microbatch_rows(sizes, rows, max_tokens_per_microbatch, packed=packed))
    return _fill(rollout, plan, packed=packed, max_over_ranks=max_over_ranks)


def divide_plan(
    rollout: Rollout,
    plan: RowLists,
    *,
    max_tokens_per_microbatch: int,
    packed: bool = True,
    max_over_ranks: Callable[[Sequence[int]], list[int]] = list,
) -> Plan:
    """Split the minibatches of a plan by another token budget; arguments as for :func:`make_plan`."""
    sizes = _sizes(rollout, packed=packed)
    divided: RowLists = []
    for minibatch in plan:
        rows = torch.tensor(sorted(row for microbatch in minibatch for row in microbatch), dtype=torch.int64)
        divided.append(_microbatch_rows(sizes, rows, max_tokens_per_microbatch, packed=packed))
    return _fill(rollout, divided, packed=packed, max_over_ranks=max_over_ranks)


def _fill(
    rollout: Rollout, plan: RowLists, *, packed: bool, max_over_ranks: Callable[[Sequence[int]], list[int]]
) -> Plan:
    """Add empty microbatches until every rank has the same number."""
    for minibatch, number in zip(plan, max_over_ranks([len(minibatch) for minibatch in plan]), strict=True):
        minibatch.extend([] for _ in range(number - len(minibatch)))
    return plan_of_rows(rollout, plan, packed=packed)


def plan_of_rows(rollout: Rollout, plan: RowLists, *, packed: bool = True) -> Plan:
    """Lay out the rows of an existing plan."""

    def microbatch(rows: list[int]) -> Microbatch:
        index = torch.tensor(rows, dtype=torch.int64)
        width = max(1, int(rollout.response_lengths[index].max())) if rows else 1
        selected = rollout.select(index, width=width) if rows else rollout.padding_rows(1).fit_width(width)
        return Microbatch(index, pack(selected, packed=packed))

    return Plan(tuple(tuple(map(microbatch, minibatch)) for minibatch in plan))


def _sizes(rollout: Rollout, *, packed: bool) -> Int[Tensor, "4 B"]:
    """Return each row's rank in the order, number of tokens, length of its longest sequence, and number of sequences.

    The order is by descending length; packed, the rows of a group, which share their prompt, are adjacent.
    """
    lengths, sequences = rollout.prompt_lengths + rollout.response_lengths, sequences_of(rollout)
    longest = lengths.scatter_reduce(0, sequences.row, sequences.lengths, "amax", include_self=False)
    order = lengths.argsort(descending=True, stable=True)
    if packed:
        group = rollout.groups.unique(return_inverse=True)[1]
        tallest = lengths.scatter_reduce(0, group, lengths, "amax", include_self=False)[group]
        for key in (group, -tallest):
            order = order[key[order].argsort(stable=True)]
    return torch.stack([order.argsort(), lengths, longest, sequences.row.bincount(minlength=len(rollout))])


def _microbatch_rows(sizes: Int[Tensor, "4 B"], rows: Tensor, budget: int, *, packed: bool) -> list[list[int]]:
    rows = rows[sizes[0, rows].argsort()]
    microbatches: list[list[int]] = []
    max_length, total, number = 0, 0, 0
    for row, (length, longest, parts) in zip(rows.tolist(), sizes[1:, rows].T.tolist(), strict=True):
        filled = total + length if packed else max(max_length, longest) * (number + parts)
        if not microbatches or filled > budget:
            microbatches.append([])
            max_length, total, number = 0, 0, 0
        microbatches[-1].append(row)
        max_length, total = max(max_length, longest), total + length
        number += parts
    return microbatches
