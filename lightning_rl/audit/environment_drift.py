"""Moves: how far the optimizer steps of a rollout move what environments say, beside what the policy drew itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.audit.forwards import policy_outputs
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import TURNS, Rollout

KEPT, MAX_ROWS, MAX_TOKENS = 8, 16, 1024  # rollouts that are kept; rows, and tokens of theirs, that are scored
SUREST = 1e-6  # one minus the largest probability that rounding tells from 1


class Move(NamedTuple):
    """How far log-probabilities moved in the optimizer steps of a rollout, in nats.

    A token that the policy is sure of has a log-probability that hardly moves, however far its logit does, while that
    of an unlikely word moves as far as its logit. So the two are compared in log-odds.

    Attributes:
        number: of the rollout.
        said: mean over the environment's tokens.
        drawn: mean over the policy's.
        size: root of the mean square over the policy's, in log-odds.
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
        before, after = self._before.double(), policy_outputs(self._module, rows).logprobs.double()
        drawn, moved = rows.token_extras[TURNS] > 0, after - before
        ours, theirs = rows.valid_tokens & drawn, rows.valid_tokens & ~drawn
        if ours.any() and theirs.any():
            size = (log_odds(after[ours]) - log_odds(before[ours])).square().mean().sqrt()
            move = Move(number, float(moved[theirs].mean()), float(moved[ours].mean()), float(size), int(theirs.sum()))
            self.moves = [*self.moves, move][-KEPT:]
        return self.moves


def log_odds(logprobs: Tensor) -> Tensor:
    """Logarithms of p / (1 - p) from those of p; of what is surer than float32 can tell, the largest it can.

    Example:
        >>> log_odds(torch.tensor([0.5, 0.9]).log())
        tensor([0.0000, 2.1972])
    """
    known = logprobs.clamp(max=-SUREST)
    return known - (-known.expm1()).log()


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
