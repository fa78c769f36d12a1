"""Estimator: base class of advantage estimators."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.reward_domain import RewardDomain
from lightning_rl.signal.shaped_rewards import shaped_rewards
from lightning_rl.utils.naming import CheckedNames

RowFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(scores [B], groups [B], rewarded [B]) -> advantages [B]``."""

EXAMPLE_ROWS = 960  # a multiple of the usual group sizes, for functions that reshape to a fixed group size


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSignal:
    """Input of an estimator: the rewards and other fields of a rollout.

    Two samples of one prompt: scores [1.0, 0.0], groups [64, 64], valid_tokens [[True, True], [True, False]], shaped
    [[0.0, 1.0], [0.0, 0.0]].

    Attributes:
        scores: Task reward plus bonuses of each row, in float64 as the rewards of a run, shape [B]; without the task
            reward outside ``rewarded``.
        rewarded: Rows that enter reward statistics, shape [B].
        groups: Prompt index of each row, shape [B]; all rows of a group are on one rank.
        valid_tokens: Tokens that train, shape [B, T].
        token_rewards: Rewards of single tokens from the corrections, shape [B, T].
        shaped: Token rewards, plus the score at the last valid token or, for turn rewards, at the turns that earned it,
            shape [B, T].
        values: Values of the critic, shape [B, T]; None without a critic.
        greedy: Score of the greedy answer to the row's prompt, shape [B]; None unless the estimator needs it.
        turns: Turn index of each token, from 1, or at most 0 for tokens of the environment, shape [B, T]; None without
            turns.
        turn_rewards: Parts of the score at the last tokens of the turns that earned them, 0 outside ``rewarded``, shape
            [B, T]; None unless the estimator has ``turn_rewards``.
        roles: Number of each token's role, :func:`.role_number`, or 0 for tokens of the environment, shape [B, T]; None
            unless the estimator reads it.
        attempts: First turn of its role that the turn of each token continues, shape [B, T]; None without roles.
        old_logprobs: Log-probabilities under the policy before the update, shape [B, T]; None if not read.
        rollout_logprobs: Log-probabilities from the engine, shape [B, T]; None if it returns none.
        sum_pi_squared: Sum of the squared probabilities of the vocabulary before each token, under the policy before
            the update, shape [B, T]; None unless the estimator reads it.
        global_sum: Sums tensors over the ranks.
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
    turn_rewards: Float[Tensor, "B T"] | None = None
    roles: Int[Tensor, "B T"] | None = None
    attempts: Int[Tensor, "B T"] | None = None
    old_logprobs: Float[Tensor, "B T"] | None = None
    rollout_logprobs: Float[Tensor, "B T"] | None = None
    sum_pi_squared: Float[Tensor, "B T"] | None = None
    global_sum: GlobalSum = local_sum

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return every tensor with its name."""
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return [(name, value) for name, value in values if isinstance(value, Tensor)]

    def clone(self) -> "RewardSignal":
        """Return a copy whose tensors share no memory with this one."""
        return replace(self, **{name: tensor.clone() for name, tensor in self.tensors()})

    def require(self, name: str, who: str) -> Tensor:
        """Return a field that must not be None.

        Raises:
            ValueError: If it is None; the message names the estimator.
        """
        value = getattr(self, name)
        if value is None:
            cure = "pass critic= to the module" if name == "values" else f'name "{name}" in its reads'
            raise ValueError(f"expected {name} for {who}, got none: {cure}")
        return value

    def spread_out(self, per_row: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
        """Return each row's value at all of its valid tokens."""
        return torch.where(self.valid_tokens, per_row[:, None], 0.0)


class Advantages(NamedTuple):
    """Output of an estimator, 0 at invalid tokens: advantages [[1.0, 1.0], [-1.0, 0.0]]; returns only with a critic."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None


class Estimator(CheckedNames, ABC):
    """Map from rewards to the advantage of each token.

    Attributes:
        reads: Names of the rollout fields that it needs.
        per_token: True if it uses token rewards; otherwise corrections with token rewards raise an error.
        needs_greedy: True if it needs a greedy answer to each prompt, which is not trained on.
        turn_rewards: True to place turn rewards of an environment at their turns in ``shaped`` instead of at the end.
        within_groups: True if a row's advantage depends only on rows of its group.
        domain: Scores for which it is defined; a rollout with others ends the run. None for any.
        shift_invariant: True if adding a constant to all scores of a group changes nothing.
    """

    reads: tuple[str, ...] = ()
    per_token: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False
    turn_rewards: bool = False
    within_groups: bool = False
    shift_invariant: bool = False
    domain: ClassVar[RewardDomain | None] = None

    @property
    def name(self) -> str:
        """Name of the estimator in messages."""
        return type(self).__name__

    @property
    def compares(self) -> bool:
        """True if groups of one have no advantage, which is evaluated on an example."""
        scores = torch.linspace(-1.0, 2.0, EXAMPLE_ROWS, dtype=torch.float64)
        valid = torch.ones(EXAMPLE_ROWS, 2, dtype=torch.bool)
        shaped, zeros = shaped_rewards(scores, None, valid), torch.zeros(EXAMPLE_ROWS, 2)
        advantages, _ = self(
            RewardSignal(
                scores=scores,
                rewarded=valid[:, 0],
                groups=torch.arange(EXAMPLE_ROWS),
                valid_tokens=valid,
                token_rewards=zeros,
                shaped=shaped,
                values=zeros,
                greedy=zeros[:, 0],
                old_logprobs=zeros - 1.0,
                rollout_logprobs=zeros - 1.0,
                sum_pi_squared=zeros + 0.5,
            )
        )
        return not bool((advantages.isfinite() & (advantages != 0)).any())

    @abstractmethod
    def __call__(self, signal: RewardSignal) -> Advantages:
        """Return the advantages, and the returns if there is a critic."""


class RowEstimator(Estimator):
    """Estimator with one advantage per row, which applies to all of its valid tokens."""

    @abstractmethod
    def per_row(
        self, scores: Float[Tensor, " B"], groups: Int[Tensor, " B"], rewarded: Bool[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """Return the advantage of each row.

        Args:
            scores: Scalar rewards, shape [B].
            groups: Prompt index of each row, shape [B].
            rewarded: Rows that take part, shape [B]; the others get 0.
        """

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(signal.spread_out(self.per_row(signal.scores, signal.groups, signal.rewarded)))


@dataclass(frozen=True, slots=True)
class FunctionEstimator(RowEstimator):
    """Estimator from a function of (scores, groups, rewarded), which is assumed to work within groups.

    Args:
        function: Returns one advantage for each row, shape [B].

    Raises:
        ValueError: When called, if the function returns anything else.
    """

    within_groups = True

    function: RowFunction

    @property
    @override
    def name(self) -> str:
        """Name of the function, without bound arguments."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(function, "__name__", type(function).__name__)

    @override
    def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Float[Tensor, " B"]:
        per_row = self.function(scores, groups, rewarded)
        if not isinstance(per_row, Tensor) or per_row.shape != scores.shape:
            rows = list(scores.shape)
            got = list(per_row.shape) if isinstance(per_row, Tensor) else type(per_row).__name__
            raise ValueError(f"expected advantages={self.name} to return one value per row {rows}, got {got}")
        return per_row
