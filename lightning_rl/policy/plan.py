"""Plan of the rows that train together, made once per rollout and used by every pass over it."""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from lightning_rl.policy.packing import Layout, pack
from lightning_rl.policy.sequences import Sequences, first_with_prompt, sequences_of
from lightning_rl.rollout import Rollout
from lightning_rl.utils.device import to_device

Entry = int | Sequence[int]
"""Row of a microbatch, or [row, number, ...] for some sequences of a row, whose others are in other microbatches."""
RowLists = Sequence[Sequence[Sequence[Entry]]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that go through the model together: index [4, 9] and their layout.

    An empty index is padding, for ranks with fewer microbatches.

    Attributes:
        index: Rows.
        layout: Layout of the rows.
        parts: Numbers of the sequences that are laid out, by place in ``index``; all of them for other rows.
    """

    index: Int[Tensor, " b"]
    layout: Layout
    parts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Microbatch":
        """Move index and layout to ``device``."""
        if self.index.device == torch.device(device):
            return self
        return replace(self, index=to_device(self.index, device), layout=self.layout.to(device))

    def rows_of(self, rollout: Rollout) -> Rollout:
        """Return the microbatch's rows with every field but arguments of the model, cut to its longest response.

        Tokens that another microbatch predicts are not valid.
        """
        if not len(self.index):
            return rollout.padding_rows(1).fit_width(self.layout.shape[1])
        rows = rollout.without_arguments().select(self.index, width=self.layout.shape[1])
        if not self.parts:
            return rows
        return rows.replace(valid_tokens=rows.valid_tokens & _mask_of(rows, self.layout.rows, self.layout.columns))

    def write(self, target: Shaped[Tensor, "B T"], source: Shaped[Tensor, "b T"]) -> None:
        """Write the values of the predicted tokens into a tensor of all rows."""
        if len(self.index):
            rows, columns = self.layout.rows, self.layout.columns
            places = self.index[rows].to(target.device), columns.to(target.device)
            target[places] = source[rows, columns].to(target)


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

        def entries(microbatch: Microbatch) -> list[Entry]:
            places, parts = enumerate(microbatch.index.tolist()), microbatch.parts
            return [[row, *parts[place]] if place in parts else row for place, row in places]

        return [[entries(microbatch) for microbatch in minibatch] for minibatch in self.minibatches]

    def rows_of_step(self, number: int) -> Int[Tensor, " b"]:
        """Return the rows of optimizer step ``number``, each once."""
        step = self.step(number)
        index = torch.cat([microbatch.index for microbatch in step] or [torch.zeros(0, dtype=torch.int64)])
        return index.unique() if any(microbatch.parts for microbatch in step) else index


def make_plan(
    rollout: Rollout,
    *,
    minibatches: int,
    max_tokens_per_microbatch: int,
    packed: bool = True,
    by_sequence: bool = False,
    max_over_ranks: Callable[[Sequence[int]], list[int]] = list,
) -> Plan:
    """Split the trained rows into minibatches of whole groups, and these into as few microbatches as possible.

    Args:
        rollout: Rollout on the CPU; rows outside ``trained`` are left out.
        minibatches: Optimizer steps per epoch.
        max_tokens_per_microbatch: Maximum tokens of a microbatch, padding included, a shared prompt once; a longer
            row gets its own.
        packed: False for padding on the right.
        by_sequence: True if the sequences of a longer row may lie in different microbatches.
        max_over_ranks: Function for the element-wise maximum over ranks, so that all have equally many microbatches.
    """
    groups = list(dict.fromkeys(rollout.groups[rollout.trained].tolist()))
    share, rest = divmod(len(groups), minibatches)
    plan: list[list[list[Entry]]] = []
    for number in range(minibatches):
        first = number * share + min(number, rest)
        chosen = torch.tensor(groups[first : first + share + (number < rest)], dtype=torch.int64)
        rows = (rollout.trained & torch.isin(rollout.groups, chosen)).nonzero()[:, 0]
        plan.append(_microbatch_rows(rollout, rows, max_tokens_per_microbatch, packed=packed, by_sequence=by_sequence))
    return _fill(rollout, plan, packed=packed, max_over_ranks=max_over_ranks)


def divide_plan(
    rollout: Rollout,
    plan: RowLists,
    *,
    max_tokens_per_microbatch: int,
    packed: bool = True,
    by_sequence: bool = False,
    max_over_ranks: Callable[[Sequence[int]], list[int]] = list,
) -> Plan:
    """Split the minibatches of a plan by another token budget; arguments as for :func:`make_plan`."""
    divided: list[list[list[Entry]]] = []
    for minibatch in plan:
        rows = torch.tensor(
            sorted({row_of(entry) for microbatch in minibatch for entry in microbatch}), dtype=torch.int64
        )
        divided.append(
            _microbatch_rows(rollout, rows, max_tokens_per_microbatch, packed=packed, by_sequence=by_sequence)
        )
    return _fill(rollout, divided, packed=packed, max_over_ranks=max_over_ranks)


def _fill(
    rollout: Rollout,
    plan: list[list[list[Entry]]],
    *,
    packed: bool,
    max_over_ranks: Callable[[Sequence[int]], list[int]],
) -> Plan:
    """Add empty microbatches until every rank has the same number."""
    for minibatch, number in zip(plan, max_over_ranks([len(minibatch) for minibatch in plan]), strict=True):
        minibatch.extend([] for _ in range(number - len(minibatch)))
    return plan_of_rows(rollout, plan, packed=packed)


def plan_of_rows(rollout: Rollout, plan: RowLists, *, packed: bool = True) -> Plan:
    """Lay out the rows of an existing plan."""

    def microbatch(entries: Sequence[Entry]) -> Microbatch:
        index = torch.tensor([row_of(entry) for entry in entries], dtype=torch.int64)
        width = max(1, int(rollout.response_lengths[index].max())) if entries else 1
        selected = rollout.select(index, width=width) if entries else rollout.padding_rows(1).fit_width(width)
        parts = {place: entry[1:] for place, entry in enumerate(entries) if not isinstance(entry, int)}
        if not parts:
            return Microbatch(index, pack(selected, packed=packed))
        sequences = sequences_of(selected)
        pairs = zip(sequences.row.tolist(), sequences.numbers.tolist(), strict=True)
        chosen = torch.tensor([number in parts.get(place, (number,)) for place, number in pairs])
        row, column = selected.valid_tokens.nonzero(as_tuple=True)
        own = chosen[sequences.line[sequences.find(row, column)]]
        selected = selected.replace(valid_tokens=_mask_of(selected, row[own], column[own]))
        return Microbatch(index, pack(selected, packed=packed, chosen=chosen), parts)

    return Plan(tuple(tuple(map(microbatch, minibatch)) for minibatch in plan))


def row_of(entry: Entry) -> int:
    """Return the row of an entry of a plan."""
    return entry if isinstance(entry, int) else entry[0]


def join_parts(plan: RowLists) -> RowLists:
    """Return a plan with whole rows, each in the first microbatch that has a part of it."""
    joined: list[list[list[int]]] = []
    for minibatch in plan:
        first: dict[int, int] = {}
        for number, microbatch in enumerate(minibatch):
            for entry in microbatch:
                first.setdefault(row_of(entry), number)
        joined.append([[row for row, place in first.items() if place == number] for number in range(len(minibatch))])
    return joined


def _mask_of(rows: Rollout, row: Int[Tensor, " A"], column: Int[Tensor, " A"]) -> Bool[Tensor, "b T"]:
    mask = torch.zeros_like(rows.valid_tokens)
    mask[row, column] = True
    return mask


def _microbatch_rows(
    rollout: Rollout, rows: Int[Tensor, " b"], budget: int, *, packed: bool, by_sequence: bool
) -> list[list[Entry]]:
    """Split rows into microbatches: packed by best fit, padded in the order of their lengths."""
    if not len(rows):
        return []
    selected = rollout.select(rows)
    sequences, index = sequences_of(selected), rows.tolist()
    numbers = sequences.row.bincount(minlength=len(rows))
    lengths = torch.zeros_like(rows).index_add(0, sequences.row, sequences.lengths)
    longest = lengths.scatter_reduce(0, sequences.row, sequences.lengths, "amax", include_self=False)
    if packed:
        again = sequences.with_prompt & (sequences.head != torch.arange(len(sequences.row)))
        lengths.index_add_(0, sequences.row[again], -selected.prompt_lengths[sequences.row[again]])
    is_long = (numbers > 1) & ((lengths if packed else longest * numbers) > budget)
    if by_sequence and bool(is_long.any()):
        whole = _microbatch_rows(rollout, rows[~is_long], budget, packed=packed, by_sequence=False)
        return whole + _parts_of_rows(rollout, rows[is_long], budget, packed=packed)
    if packed:
        microbatches = _pack_groups(sequences, lengths, budget)
    else:
        microbatches = _fill_lines(lengths, longest.tolist(), numbers.tolist(), budget)
    return [[index[row] for row in microbatch] for microbatch in microbatches]


def _parts_of_rows(rollout: Rollout, rows: Int[Tensor, " b"], budget: int, *, packed: bool) -> list[list[Entry]]:
    """Split the sequences of rows that predict a valid token into microbatches, without regard to shared prompts."""
    selected = rollout.select(rows)
    sequences, index = sequences_of(selected), rows.tolist()
    used = sequences.line[sequences.find(*selected.valid_tokens.nonzero(as_tuple=True))].unique()
    lengths = sequences.lengths[used]
    sizes = lengths.tolist()
    bins = _best_fit(sizes, budget) if packed else _fill_lines(lengths, sizes, [1] * len(sizes), budget)
    row, numbers = sequences.row[used].tolist(), sequences.numbers[used].tolist()
    microbatches = list[list[Entry]]()
    for members in bins:
        parts: dict[int, list[int]] = {}
        for place in sorted(members):
            parts.setdefault(row[place], [index[row[place]]]).append(numbers[place])
        microbatches.append(list[Entry](parts.values()))
    return microbatches


def _fill_lines(lengths: Int[Tensor, " b"], longest: list[int], numbers: list[int], budget: int) -> list[list[int]]:
    """Fill padded microbatches in the order of lengths; a row has some lines, of at most ``longest`` tokens."""
    microbatches, widest, filled = list[list[int]](), 0, 0
    for row in lengths.argsort(descending=True, stable=True).tolist():
        widest, filled = max(widest, longest[row]), filled + numbers[row]
        if not microbatches or widest * filled > budget:
            microbatches.append([])
            widest, filled = longest[row], numbers[row]
        microbatches[-1].append(row)
    return microbatches


def _pack_groups(sequences: Sequences, lengths: Int[Tensor, " b"], budget: int) -> list[list[int]]:
    """Keep rows together that share their prompt, split those above the budget, and fill microbatches."""
    rows, is_head = sequences.rows, sequences.with_prompt & (sequences.head == torch.arange(len(sequences.row)))
    inputs = sequences.inputs[is_head]
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
