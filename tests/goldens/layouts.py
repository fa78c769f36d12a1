"""Token layouts of other systems: shifted by one, carried through masked positions, cut into episodes."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PerRow = Callable[..., Tensor]


def prediction_aligned(values: Tensor) -> Tensor:
    """Moves every token's value to the position that predicts it; the last position has none."""
    moved = torch.roll(values, -1, dims=-1)
    moved[..., -1] = 0
    return moved


def carried_back(values: Tensor, mask: Tensor) -> Tensor:
    """At a masked position the value of the next valid one; 0 after the last."""
    found, following = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        following = torch.where(mask[:, step], values[:, step], following)
        found[:, step] = following
    return found


def by_episode(function: PerRow, mask: Tensor, ends: Tensor, *values: Tensor) -> Tensor:
    """Call a function on runs of valid positions as separate rows.

    Args:
        function: of padded values and their mask; returns one number for each position.
        mask: positions that belong to a run.
        ends: positions that are the last of theirs.
        values: what the function gets.
    """
    starts = mask & ~(torch.nn.functional.pad(mask & ~ends, (1, -1)))
    number = starts.flatten().cumsum(0).reshape(mask.shape)[mask]
    lengths = torch.bincount(number)[1:].tolist()
    padded = [pad_sequence(list(one[mask].split(lengths)), batch_first=True) for one in values]
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found = torch.zeros_like(values[0])
    found[mask] = function(*padded, inside)[inside]
    return found
