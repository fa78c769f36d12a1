"""Selection of the few groups and rows on which stages are repeated; it differs between turns."""

import torch

from lightning_rl.rollout import Rollout

MAX_GROUPS, MAX_ROWS = 4, 6


def some_groups(rollout: Rollout, turn: int) -> Rollout:
    """Return a few whole groups, those with different rewards first."""
    ids, index = torch.unique(rollout.groups, return_inverse=True)
    scores = torch.where(rollout.rewarded, rollout.rewards.double(), torch.nan)
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    low = zeros.scatter_reduce(0, index, scores.nan_to_num(torch.inf), "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, scores.nan_to_num(-torch.inf), "amax", include_self=False)
    spread = dict(zip(ids.tolist(), (high > low).tolist(), strict=True))
    chosen = sorted(spread, key=lambda group: (not spread[group], order_of(group, turn)))[:MAX_GROUPS]
    return rollout.select(torch.isin(rollout.groups, torch.tensor(chosen, dtype=ids.dtype, device=ids.device)))


def some_rows(groups: Rollout, turn: int) -> Rollout:
    """Return a few trained rows, with the longest and the shortest, cut to the longest."""
    lengths, ids = groups.response_lengths.tolist(), groups.sample_ids.tolist()
    rows = (groups.trained & groups.valid_tokens.any(-1)).nonzero()[:, 0].tolist()
    rows.sort(key=lambda row: order_of(ids[row], turn))
    ends = [pick(rows, key=lengths.__getitem__) for pick in (max, min)] if rows else []
    chosen = sorted(list(dict.fromkeys([*ends, *rows]))[:MAX_ROWS])
    width = max([1, *(lengths[row] for row in chosen)])
    return groups.select(torch.tensor(chosen, dtype=torch.int64, device=groups.groups.device)).fit_width(width)


def order_of(number: int, turn: int) -> int:
    """Return a sort key of an id that is independent of its content and differs between turns."""
    return (number * 0x9E3779B1 + turn * 0x85EBCA6B) % 2**32
