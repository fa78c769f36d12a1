"""Change of the log-probabilities of environment tokens and policy tokens in the optimizer steps of a rollout."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.audit.forwards import policy_outputs
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import TURNS, Rollout

KEPT, MAX_ROWS, MAX_TOKENS = 8, 16, 1024  # rollouts to keep; rows and tokens to score
SUREST = 1e-6  # one minus the largest probability that rounding separates from 1


class Move(NamedTuple):
    """Change of log-probabilities in the optimizer steps of a rollout, in nats.

    The log-probability of a near-certain token hardly moves, however far its logit does, while that of an unlikely
    token moves as far as its logit. So both are compared in log-odds.

    Attributes:
        number: Number of the rollout.
        said: Mean change over environment tokens.
        drawn: Mean change over policy tokens.
        size: Root mean square change over policy tokens, in log-odds.
        tokens: Number of scored environment tokens.
    """

    number: int
    said: float
    drawn: float
    size: float
    tokens: int


class MoveWatch:
    """Scores all tokens of a few rows before the first and after the last optimizer step of a rollout."""

    def __init__(self, module: RLLightningModule) -> None:
        self._module = module
        self._rows: Rollout | None = None
        self._before = torch.zeros(0)
        self.moves: list[Move] = []

    def before(self, rollout: Rollout) -> None:
        """Score a few rows before the update. A collective, also on ranks without such rows."""
        self._rows = None
        if TURNS not in rollout.token_extras:
            return
        self._rows = rows = _rows_of(rollout)
        self._before = policy_outputs(self._module, rows).logprobs

    def after(self, number: int) -> Sequence[Move]:
        """Score the rows again and return the latest moves. A collective."""
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
    """Return log(p / (1 - p)) from log(p), with p clamped to the largest value that float32 separates from 1.

    Example:
        >>> log_odds(torch.tensor([0.5, 0.9]).log())
        tensor([0.0000, 2.1972])
    """
    known = logprobs.clamp(max=-SUREST)
    return known - (-known.expm1()).log()


def _rows_of(rollout: Rollout) -> Rollout:
    """Return a few rows with environment tokens, spread over the rollout, with all tokens valid."""
    inside = torch.arange(rollout.width, device=rollout.groups.device) < rollout.response_lengths[:, None]
    inside &= rollout.token_extras[TURNS] >= 0  # a rewritten context does not follow a token of the row
    spoken = (inside & (rollout.token_extras[TURNS] == 0)).any(-1) & rollout.trained
    rows = spoken.nonzero()[:, 0].tolist()
    rows = rows[:: max(len(rows) // MAX_ROWS, 1)][:MAX_ROWS]
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    affordable = [row for place, row in enumerate(rows) if sum(lengths[one] for one in rows[: place + 1]) <= MAX_TOKENS]
    chosen = torch.tensor(affordable or rows[:1], dtype=torch.int64, device=rollout.groups.device)
    width = max([1, *(int(rollout.response_lengths[row]) for row in chosen.tolist())])
    return rollout.replace(valid_tokens=inside, trained=rollout.real).select(chosen).fit_width(width)
