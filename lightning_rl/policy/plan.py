"""Plan of the rows that train together, made once per rollout and used by every pass over it."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rl.policy.packing import Layout, pack
from lightning_rl.policy.sequences import Sequences, first_with_prompt, sequences_of
from lightning_rl.rollout import Rollout
from lightning_rl.utils.device import to_device

RowLists = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that go through the model together: index [4, 9] and their layout.

    An empty index is padding, for ranks with fewer microbatches.
    """

    index: Int[Tensor, " b"]
    layout: Layout

    def to(self, device: torch.device | str) -> "Microbatch":
        """Move index and layout to ``device``."""
        if self.index.device == torch.device(device):
            return self
        return Microbatch(to_device(self.index, device), self.layout.to(device))

    def rows_of(self, rollout: Rollout) -> Rollout:
        """Return the microbatch's rows with every field but arguments of the model, cut to its longest response."""
        if not len(self.index):
            return rollout.padding_rows(1).fit_width(self.layout.shape[1])
        return rollout.without_arguments().select(self.index, width=self.layout.shape[1])


@dataclass(frozen=True, slots=True)
class Plan:
    """Microbatches of each minibatch: 2 minibatches with 3 and 2 microbatches.

    One minibatch is one optimizer step; epochs repeat them in the same order.
    """

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
    """Split the trained rows into minibatches of whole groups, and these into as few microbatches as possible.

    Args:
        rollout: Rollout on the CPU; rows outside ``trained`` are left out.
        minibatches: Optimizer steps per epoch.
        max_tokens_per_microbatch: Maximum tokens of a microbatch, padding included, a shared prompt once; a longer
            row gets its own.
        packed: False for padding on the right.
        max_over_ranks: Function for the element-wise maximum over ranks, so that all have equally many microbatches.
    """
    groups = list(dict.fromkeys(rollout.groups[rollout.trained].tolist()))
    share, rest = divmod(len(groups), minibatches)
    plan: RowLists = []
    for number in range(minibatches):
        first = number * share + min(number, rest)
        chosen = torch.tensor(groups[first : first + share + (number < rest)], dtype=torch.int64)
        rows = (rollout.trained & torch.isin(rollout.groups, chosen)).nonzero()[:, 0]
        plan.append(_microbatch_rows(rollout, rows, max_tokens_per_microbatch, packed=packed))
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
    divided: RowLists = []
    for minibatch in plan:
        rows = torch.tensor(sorted(row for microbatch in minibatch for row in microbatch), dtype=torch.int64)
        divided.append(_microbatch_rows(rollout, rows, max_tokens_per_microbatch, packed=packed))
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


def _microbatch_rows(rollout: Rollout, rows: Int[Tensor, " b"], budget: int, *, packed: bool) -> list[list[int]]:
    """Split rows into microbatches: packed by best fit, padded in the order of their lengths."""
    if not len(rows):
        return []
    selected, microbatches = rollout.select(rows), list[list[int]]()
    sequences = sequences_of(selected)
    lengths = torch.zeros_like(rows).index_add(0, sequences.row, sequences.lengths)
    if packed:
        again = sequences.with_prompt.index_fill(0, sequences.heads, value=False)  # reads the prompt of another branch
        lengths.index_add_(0, sequences.row[again], -selected.prompt_lengths[sequences.row[again]])
        microbatches = _pack_groups(sequences, lengths, budget)
    else:
        longest = lengths.scatter_reduce(0, sequences.row, sequences.lengths, "amax", include_self=False).tolist()
        numbers, widest, filled = sequences.row.bincount().tolist(), 0, 0
        for row in lengths.argsort(descending=True, stable=True).tolist():
            widest, filled = max(widest, longest[row]), filled + numbers[row]
            if not microbatches or widest * filled > budget:
                microbatches.append([])
                widest, filled = longest[row], numbers[row]
            microbatches[-1].append(row)
    index = rows.tolist()
    return [[index[row] for row in microbatch] for microbatch in microbatches]


def _pack_groups(sequences: Sequences, lengths: Int[Tensor, " b"], budget: int) -> list[list[int]]:
    """Keep rows together that share their prompt, split those above the budget, and fill microbatches."""
    rows, inputs = sequences.rows, sequences.inputs[sequences.heads]
    columns = first_with_prompt(rows), lengths, torch.minimum(rows.prompt_lengths, inputs)
    first, tokens, prompts = (tensor.tolist() for tensor in columns)
    order = lengths.argsort(descending=True, stable=True)
    groups: dict[int, list[int]] = {}
    for row in order.tolist():
        groups.setdefault(first[row], []).append(row)
    parts: list[list[int]] = []
    costs: list[int] = []
    for group in groups.values():
        prompt, own = max(prompts[row] for row in group), [tokens[row] - prompts[row] for row in group]
        for part in _best_fit(own, budget - prompt):
            parts.append([group[number] for number in part])
            costs.append(prompt + sum(own[number] for number in part))
    places = order.argsort().tolist()
    bins = ([row for number in numbers for row in parts[number]] for numbers in _best_fit(costs, budget))
    return [sorted(members, key=places.__getitem__) for members in bins]


def _best_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of sizes in bins of a budget: the largest first, each in the bin with the least room for it."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of each bin, ascending
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = bisect_left(rooms, (sizes[index],))
        if place == len(rooms):
            bins.append([])
            rooms.append((budget, len(bins) - 1))
        room, number = rooms.pop(place)
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return bins
