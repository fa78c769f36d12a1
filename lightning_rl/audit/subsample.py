"""Slices: the few groups and rows of a rollout on which stages are repeated; others at every audit."""

import torch

from lightning_rl.rollout import Rollout

MOST_GROUPS, MOST_ROWS = 4, 6


def some_groups(rollout: Rollout, turn: int) -> Rollout:
    """A few whole groups, with different rewards first; ``turn`` says which of them."""
    ids, index = torch.unique(rollout.groups, return_inverse=True)
    scores = torch.where(rollout.rewarded, rollout.rewards.double(), torch.nan)
    low = torch.full_like(ids, 0, dtype=torch.float64).scatter_reduce_(
        0, index, scores.nan_to_num(torch.inf), "amin", include_self=False
    )
    high = torch.full_like(low, 0).scatter_reduce_(0, index, scores.nan_to_num(-torch.inf), "amax", include_self=False)
    spread = dict(zip(ids.tolist(), (high > low).tolist(), strict=True))
    chosen = sorted(spread, key=lambda group: (not spread[group], _mixed(group, turn)))[:MOST_GROUPS]
    return rollout.select(torch.isin(rollout.groups, torch.tensor(chosen, dtype=ids.dtype, device=ids.device)))


def some_rows(groups: Rollout, turn: int) -> Rollout:
    """A few rows that train, the longest and the shortest among them, cut to the longest."""
    kept = (groups.trained & groups.valid_tokens.any(-1)).nonzero()[:, 0].tolist()
    lengths, ids = groups.response_lengths.tolist(), groups.sample_ids.tolist()
    kept.sort(key=lambda row: _mixed(ids[row], turn))
    ends = [max(kept, key=lambda row: lengths[row]), min(kept, key=lambda row: lengths[row])] if kept else []
    chosen = sorted(list(dict.fromkeys([*ends, *kept]))[:MOST_ROWS])
    width = max([1, *(lengths[row] for row in chosen)])
    return groups.select(torch.tensor(chosen, dtype=torch.int64, device=groups.groups.device)).fit_width(width)


def _mixed(number: int, turn: int) -> int:
    return (number * 0x9E3779B1 + turn * 0x85EBCA6B) % 2**32
