"""Rows of made-up batches, and the finished rollout of rows, in which no two policies agree."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.fields import Ragged
from lightning_rl.rollout import (
    EXPERT_LOAD,
    GREEDY_SCORE,
    ROUTES,
    SAMPLING_MASK,
    SUM_PI_SQUARED,
    TOP_IDS,
    TOP_LOGPROBS,
    TURN_REWARDS,
    FinishReason,
    Rollout,
    segments_of,
)

MAX_LENGTH, PROMPTS = 5, 3
SHAPED_BY_LIBRARY = frozenset((ROUTES, EXPERT_LOAD, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS, TURN_REWARDS))
"""Extras of the library with a meaning, which are not made up."""
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


@dataclass(frozen=True, kw_only=True)
class Row:
    """One response.

    Attributes:
        tokens: True for each token that the policy sampled, False for those of a tool; none in an aborted row.
        prompt: Number of its prompt.
        reward: Task reward.
        rewarded: True if it enters statistics of the reward.
        trained: True if it trains.
        truncated: True if it ended at the length limit.
    """

    tokens: tuple[bool, ...] = (True,)
    prompt: int = 0
    reward: int = 0
    rewarded: bool = True
    trained: bool = True
    truncated: bool = False

    def __str__(self) -> str:
        """Return a table line, with ``x`` for a sampled token and ``.`` for another one."""
        states = {"not rewarded": not self.rewarded, "not trained": not self.trained, "truncated": self.truncated}
        states_text = "".join(f", {state}" for state, holds in states.items() if holds)
        tokens = "".join("x" if sampled else "." for sampled in self.tokens) or "(none)"
        return f"prompt {self.prompt}  tokens {tokens:<{MAX_LENGTH + 1}} reward {self.reward}{states_text}"


def rollout_of_rows(rows: Sequence[Row], seed: int = 0) -> Rollout:
    """Return a finished float64 rollout of rows; log-probabilities, values and entropies depend on the seed only.

    Fields are 0 outside of the valid tokens, no two policies agree, and rows without a valid token are kept.
    """
    trained = torch.tensor([row.trained for row in rows])
    sampled = Rollout.of_samples(
        [(2,)] * len(rows),
        [(3,) * len(row.tokens) for row in rows],
        groups=[row.prompt for row in rows],
        sample_ids=[number + 7 for number in range(len(rows))],
        finish=[(LENGTH if row.truncated else STOP) if row.tokens else ABORT for row in rows],
        actions=[row.tokens for row in rows],
        dtype=torch.float64,
    )
    valid, generator = sampled.action_mask & trained[:, None], torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.where(valid, torch.randn(valid.shape, generator=generator, dtype=torch.float64) * scale, 0.0)

    rollout_logprobs = torch.where(valid, -noise(1.0).abs() - 0.2, 0.0)
    old = rollout_logprobs + noise(0.15)
    rewards = torch.tensor([float(row.reward) for row in rows], dtype=torch.float64)
    return sampled.replace(
        rollout_logprobs=rollout_logprobs,
        old_logprobs=old,
        ref_logprobs=old + noise(0.3),
        values=noise(0.5),
        advantages=noise(1.0),
        returns=noise(1.0),
        valid_tokens=valid,
        trained=trained,
        rewards=rewards,
        rewards_by_function={"task": rewards},
        rewarded=torch.tensor([row.rewarded for row in rows]) & trained,
        extras={GREEDY_SCORE: torch.randn(PROMPTS, generator=generator, dtype=torch.float64)[sampled.groups]},
        segments=_segments_of_runs(sampled),
        token_extras={
            "teacher_logprobs": old + noise(0.3),
            SUM_PI_SQUARED: torch.where(old != 0, (2 * old).exp() * 1.25, 0.0),
        },
    )


def add_fields_of(rollout: Rollout, callbacks: Sequence[RLCallback]) -> Rollout:
    """Add the fields that corrections provide and the rollout lacks, and extras that they declare and none provides.

    Such an extra has numbers between 0 and 1: one for each token, or one for each row.
    """
    known = {f"{field}/{key}" for field in ("extras", "token_extras") for key in getattr(rollout, field)}
    provided = {name for callback in callbacks for name in callback.provides}
    fields = {"extras": dict(rollout.extras), "token_extras": dict(rollout.token_extras)}
    for callback in callbacks:
        recorded = [f"token_extras/{name}" for name in callback.records]
        for name in {*recorded, *callback.reads, *callback.reads_at_loss} - known - provided:
            field, _, key = name.partition("/")
            if field in fields and key not in SHAPED_BY_LIBRARY:
                chances = torch.where(rollout.valid_tokens, rollout.require("old_logprobs").exp().clamp(max=1.0), 0.0)
                fields[field][key] = chances if field == "token_extras" else chances.amax(-1)
    rollout = rollout.replace(**fields)
    return Corrections([one for one in callbacks if _provides_more(one, known)]).provide(rollout)


def _provides_more(callback: RLCallback, known: Set[str]) -> bool:
    return not known >= {*callback.provides} if callback.provides else "provide" in callback.contributes


def _segments_of_runs(rows: Rollout) -> Ragged:
    """Return a segment for each run of sampled tokens; the context after a turn with an odd number is new."""
    sampled = rows.action_mask
    starts = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    number = starts.cumsum(-1)
    turns = torch.where(sampled, number, torch.where(number % 2 == 1, -number, 0))
    return segments_of(turns, rows.response_lengths)
