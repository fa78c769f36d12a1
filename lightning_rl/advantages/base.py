"""Estimator: from the rewards of a rollout to the advantage of each token."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.rewards import shaped_rewards

RowFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(scores [B], groups [B], rewarded [B]) -> advantages [B]``."""

WITNESSES = 960  # rows; a multiple of the usual group sizes, for functions that reshape by a number of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSignal:
    """What an estimator sees of a rollout.

    Attributes:
        scores: task reward plus bonuses of each row, shape [B]; no task reward outside ``rewarded``.
        rewarded: rows that enter statistics of the reward, shape [B].
        groups: which prompt each row answers, shape [B]; a group lies on one rank.
        valid_tokens: tokens that train, shape [B, T].
        token_rewards: what the corrections give to single tokens, shape [B, T].
        shaped: token rewards, plus the score at the last valid token, or what turns earned of it where they did, shape
            [B, T].
        values: of the critic, shape [B, T]; None without one.
        greedy: score of the greedy answer to the row's prompt, shape [B]; None unless the estimator asks for it.
        turns: which turn drew each token, from 1, at most 0 for the environment's, shape [B, T]; None without turns.
        old_logprobs: of the policy before the update, shape [B, T]; None where nobody reads them.
        rollout_logprobs: as the engine said, shape [B, T]; None if it says none.
        sum_pi_squared: sum of the squared probabilities of the whole vocabulary before each token, under the policy
            before the update, shape [B, T]; None unless the estimator reads it.
        global_sum: adds tensors up over the ranks.
    """

    scores: Float[Tensor, " B"]
    rewarded: Bool[Tensor, " B"]
    groups: Int[Tensor, " B"]
    valid_tokens: Bool[Tensor, "B T"]
    token_rewards: Float[Tensor, "B T"]
    shaped: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None = None
    greedy: Float[Tensor, " B"] | None = None
    turns: Int[Tensor, "B T"] | None = None
    old_logprobs: Float[Tensor, "B T"] | None = None
    rollout_logprobs: Float[Tensor, "B T"] | None = None
    sum_pi_squared: Float[Tensor, "B T"] | None = None
    global_sum: GlobalSum = local_sum

    def require(self, name: str, who: str) -> Tensor:
        """A field that must be there.

        Raises:
            ValueError: if it is None; the message names the estimator that asks.
        """
        value = getattr(self, name)
        if value is None:
            cure = "pass critic= to the module" if name == "values" else f'name "{name}" in its reads'
            raise ValueError(f"expected {name} for {who}, got none: {cure}")
        return value

    def spread_out(self, per_row: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
        """One number for each row at all of its valid tokens."""
        return torch.where(self.valid_tokens, per_row[:, None], 0.0)


class Advantages(NamedTuple):
    """What an estimator gives, both 0 at invalid tokens; returns only if a critic learns them."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None


class Estimator(ABC):
    """From rewards to the advantage of each token.

    Attributes:
        reads: names of the rollout fields that it needs.
        per_token: whether it uses token rewards; if not, corrections that give some are refused.
        needs_greedy: whether it needs a greedy answer to each prompt, which never trains.
        turn_rewards: whether what an environment gave for a turn stands at that turn in ``shaped``, and not at the end.
        within_groups: whether a row's advantage depends on the rows of its own group alone.
        shift_invariant: whether a constant added to all scores of a group changes nothing.
    """

    reads: tuple[str, ...] = ()
    per_token: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False
    turn_rewards: bool = False
    within_groups: bool = False
    shift_invariant: bool = False

    @property
    def name(self) -> str:
        """How error messages call it."""
        return type(self).__name__

    @property
    def compares(self) -> bool:
        """Whether it compares the rows of a group, so that groups of one teach nothing: it is tried on some."""
        scores = torch.linspace(-1.0, 2.0, WITNESSES)
        valid = torch.ones(WITNESSES, 2, dtype=torch.bool)
        shaped, nothing = shaped_rewards(scores, None, valid), torch.zeros(WITNESSES, 2)
        advantages, _ = self(
            RewardSignal(
                scores=scores,
                rewarded=valid[:, 0],
                groups=torch.arange(WITNESSES),
                valid_tokens=valid,
                token_rewards=nothing,
                shaped=shaped,
                values=nothing,
                greedy=nothing[:, 0],
                old_logprobs=nothing - 1.0,
                rollout_logprobs=nothing - 1.0,
                sum_pi_squared=nothing + 0.5,
            )
        )
        return not bool((advantages.isfinite() & (advantages != 0)).any())

    @abstractmethod
    def __call__(self, signal: RewardSignal) -> Advantages:
        """Advantages, and returns if a critic is to learn them."""


class RowEstimator(Estimator):
    """An estimator that gives one advantage to each row, which stands at all of its valid tokens."""

    @abstractmethod
    def per_row(
        self, scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """The advantage of each row.

        Args:
            scores: scalar rewards, shape [B].
            groups: which prompt each row answers, shape [B].
            rewarded: the rows that take part, shape [B]; the others get 0.
        """

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(signal.spread_out(self.per_row(signal.scores, signal.groups, signal.rewarded)))


@dataclass(frozen=True, slots=True)
class FunctionEstimator(RowEstimator):
    """A plain function of (scores, groups, rewarded) as an estimator. It is taken to look at one group at a time.

    Args:
        function: returns one advantage for each row, shape [B].

    Raises:
        ValueError: when called, if the function returns anything else.
    """

    within_groups = True

    function: RowFunction

    @property
    @override
    def name(self) -> str:
        """The function's own name, whatever options are bound to it."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(function, "__name__", type(function).__name__)

    @override
    def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Float[Tensor, " B"]:
        per_row = self.function(scores, groups, rewarded)
        if not isinstance(per_row, Tensor) or per_row.shape != scores.shape:
            rows = list(scores.shape)
            got = list(per_row.shape) if isinstance(per_row, Tensor) else type(per_row).__name__
            raise ValueError(f"expected advantages={self.name} to return a number for each row {rows}, got {got}")
        return per_row
