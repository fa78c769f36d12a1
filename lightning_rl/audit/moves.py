"""Moves: how far the optimizer steps of a rollout move what environments say, beside what the policy drew itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.audit.forwards import policy_outputs
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import TURNS, Rollout

KEPT, MAX_ROWS, MAX_TOKENS = 8, 16, 1024  # rollouts that are kept; rows, and tokens of theirs, that are scored


class Move(NamedTuple):
    """How far log-probabilities moved in the optimizer steps of a rollout, in nats.

    Attributes:
        number: of the rollout.
        said: mean over the environment's tokens.
        drawn: mean over the policy's.
        size: root of the mean square over the policy's.
        tokens: of the environment that were looked at.
    """

    number: int
    said: float
    drawn: float
    size: float
    tokens: int


class MoveWatch:
    """Scores a few rows with all their tokens before the first optimizer step of a rollout and after its last one.

    Args:
        module: the run.
    """

    def __init__(self, module: RLLightningModule) -> None:
        self._module = module
        self._rows: Rollout | None = None
        self._before = torch.zeros(0)
        self.moves: list[Move] = []

    def before(self, rollout: Rollout) -> None:
        """Scores some rows. Every rank calls it, one without such rows too."""
        self._rows = None
        if TURNS not in rollout.token_extras:
            return
        self._rows = rows = _rows_of(rollout)
        self._before = policy_outputs(self._module, rows).logprobs

    def after(self, number: int) -> Sequence[Move]:
        """Scores them again, and returns the last moves. Every rank calls it."""
        rows, self._rows = self._rows, None
        if rows is None:
            return self.moves
        moved = (policy_outputs(self._module, rows).logprobs - self._before).double()
        drawn = rows.token_extras[TURNS] > 0
        ours, theirs = moved[rows.valid_tokens & drawn], moved[rows.valid_tokens & ~drawn]
        if len(ours) and len(theirs):
            move = Move(number, float(theirs.mean()), float(ours.mean()), _size(ours), len(theirs))
            self.moves = [*self.moves, move][-KEPT:]
        return self.moves


def _size(moved: Tensor) -> float:
    return float(moved.square().mean().sqrt())


def _rows_of(rollout: Rollout) -> Rollout:
    """The first rows in which an environment speaks, from all over the rollout, with all of their tokens."""
    inside = torch.arange(rollout.width, device=rollout.groups.device) < rollout.response_lengths[:, None]
    inside &= rollout.token_extras[TURNS] >= 0  # a context that is rewritten follows no token of the row
    said = (inside & (rollout.token_extras[TURNS] == 0)).any(-1) & rollout.trained
    rows = said.nonzero()[:, 0].tolist()
    rows = rows[:: max(len(rows) // MAX_ROWS, 1)][:MAX_ROWS]
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    affordable = [row for place, row in enumerate(rows) if sum(lengths[one] for one in rows[: place + 1]) <= MAX_TOKENS]
    chosen = torch.tensor(affordable or rows[:1], dtype=torch.int64, device=rollout.groups.device)
    width = max([1, *(int(rollout.response_lengths[row]) for row in chosen.tolist())])
    return rollout.replace(valid_tokens=inside, trained=rollout.real).select(chosen).fit_width(width)
