"""What ``advantages=`` accepts: an estimator object, a function of one scalar per row, or a known name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.signal.advantages import (
    Level,
    check_levels,
    dr_grpo,
    grpo,
    maxrl,
    normalised,
    opo,
    reinforce,
    rloo,
)
from lightning_rl.signal.masked import GlobalSum, global_moments, own_sum, whiten
from lightning_rl.signal.returns import check_decay, discounted_returns, gae

RowFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(scores [B], groups [B], rewarded [B]) -> advantages [B]``, such as :func:`lightning_rl.signal.advantages.grpo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSignal:
    """What an estimator sees of a rollout.

    Attributes:
        scores: task reward plus bonuses of each row, shape [B]; no task reward outside ``rewarded``.
        rewarded: rows that enter statistics of the reward, shape [B].
        groups: which prompt each row answers, shape [B]; a group lies on one rank.
        valid_tokens: tokens that train, shape [B, T].
        token_rewards: what the corrections give to single tokens, shape [B, T].
        shaped: token rewards, plus the score at the last valid token, shape [B, T].
        values: of the critic, shape [B, T]; None without one.
        greedy: score of the greedy answer to the row's prompt, shape [B]; None unless the estimator asks for it.
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
    global_sum: GlobalSum = own_sum

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
    """

    reads: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """How error messages call it."""
        return type(self).__name__

    @property
    def compares(self) -> bool:
        """Whether it compares the rows of a group, so that a group of one teaches nothing."""
        return False

    @abstractmethod
    def __call__(self, signal: RewardSignal) -> Advantages:
        """Advantages, and returns if a critic is to learn them."""


@dataclass(frozen=True, slots=True)
class PerRow(Estimator):
    """A plain function of (scores, groups, rewarded) as an estimator.

    Args:
        function: returns one advantage for each row, shape [B].

    Raises:
        ValueError: when called, if the function returns anything else.
    """

    function: RowFunction

    @property
    @override
    def name(self) -> str:
        """The function's own name."""
        function = self.bare
        return getattr(function, "__name__", type(function).__name__)

    @property
    @override
    def compares(self) -> bool:
        """Whether it is one of the library's functions that subtract what the group has in common."""
        return self.bare in (grpo, dr_grpo, rloo, maxrl)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        per_row, rows = self.function(signal.scores, signal.groups, signal.rewarded), signal.scores.shape
        if not isinstance(per_row, Tensor) or per_row.shape != rows:
            got = list(per_row.shape) if isinstance(per_row, Tensor) else type(per_row).__name__
            raise ValueError(f"expected advantages={self.name} to return a number for each row {list(rows)}, got {got}")
        return Advantages(signal.spread_out(per_row))

    @property
    def bare(self) -> RowFunction:
        """The function without options that were bound to it."""
        return self.function.func if isinstance(self.function, partial) else self.function


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalised(Estimator):
    """The reward minus a mean, over a deviation, each of the group, the batch or left out.

    Source: LitePPO (group mean, batch deviation): Liu et al. 2025, arXiv:2508.08221; the others as in
    :func:`lightning_rl.signal.advantages.normalised`.

    Args:
        mean: what the subtracted mean runs over: ``"group"``, ``"batch"`` or ``"none"``.
        std: what the standard deviation runs over.
        leave_one_out: subtract the mean of the other rows.
        unbiased: whether the variance divides by n - 1 instead of n.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: if a level is unknown or the options do not fit together.
    """

    mean: Level = "group"
    std: Level = "group"
    leave_one_out: bool = False
    unbiased: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Checks the options."""
        check_levels(self.mean, self.std, leave_one_out=self.leave_one_out, epsilon=self.epsilon)

    @property
    @override
    def compares(self) -> bool:
        """Whether a group of one has no deviation."""
        return "group" in (self.mean, self.std)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        per_row = normalised(
            signal.scores, signal.groups, signal.rewarded, mean=self.mean, std=self.std,
            leave_one_out=self.leave_one_out, unbiased=self.unbiased, epsilon=self.epsilon,
            global_sum=signal.global_sum,
        )  # fmt: skip
        return Advantages(signal.spread_out(per_row))


@dataclass(frozen=True, slots=True)
class OPO(Estimator):
    """The reward minus the length-weighted mean of its group.

    Source: Hao et al. 2025, arXiv:2505.23585.
    """

    @property
    @override
    def compares(self) -> bool:
        """Always."""
        return True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        lengths = signal.valid_tokens.sum(-1)
        return Advantages(signal.spread_out(opo(signal.scores, signal.groups, signal.rewarded, lengths)))


@dataclass(frozen=True, slots=True)
class ReMax(Estimator):
    """The reward from each token on, minus the score of the greedy answer to the same prompt.

    The greedy answer is one request more for each prompt; it never trains. Rows whose greedy answer has no reward are
    not rewarded.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """

    per_token: ClassVar[bool] = True
    needs_greedy: ClassVar[bool] = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        if signal.greedy is None:
            raise ValueError("expected the score of a greedy answer for ReMax, got none")
        baseline = torch.where(signal.rewarded, signal.greedy, 0.0)
        return Advantages(discounted_returns(signal.shaped, signal.valid_tokens) - signal.spread_out(baseline))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus(Estimator):
    """Discounted returns of the shaped reward, whitened over all valid tokens of rewarded rows.

    A row that is not rewarded has no task part after whitening either: its penalties are scaled and not shifted.

    Source: Hu et al. 2025, arXiv:2501.03262.

    Args:
        gamma: discount of a step, in [0, 1].

    Raises:
        ValueError: if ``gamma`` leaves [0, 1].
    """

    per_token: ClassVar[bool] = True

    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_decay(gamma=self.gamma)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(_whitened(discounted_returns(signal.shaped, signal.valid_tokens, gamma=self.gamma), signal))


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(Estimator):
    """The reward minus the mean of its group, plus each token's own reward, whitened over all valid tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, the variant with a group baseline.
    """

    per_token: ClassVar[bool] = True

    @property
    @override
    def compares(self) -> bool:
        """Always."""
        return True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        centred = dr_grpo(signal.scores, signal.groups, signal.rewarded)
        return Advantages(_whitened(signal.spread_out(centred) + signal.token_rewards, signal))


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(Estimator):
    """Generalised advantage estimation with a critic, as PPO uses it.

    Source: Schulman et al. 2015, arXiv:1506.02438.

    Args:
        gamma: discount of a step, in [0, 1].
        lam: decay of later temporal differences, in [0, 1].
        whitened: whether advantages are shifted and scaled to mean 0 and deviation 1 over all valid tokens.

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].
    """

    reads: ClassVar[tuple[str, ...]] = ("values",)
    per_token: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float = 1.0
    whitened: bool = True

    def __post_init__(self) -> None:
        """Checks the bounds."""
        check_decay(gamma=self.gamma, lam=self.lam)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        if signal.values is None:
            raise ValueError("expected values for GAE, got none: pass critic= to the module")
        valid = signal.valid_tokens
        raw = gae(signal.shaped, signal.values, valid, gamma=self.gamma, lam=self.lam)
        returns = raw + torch.where(valid, signal.values, 0.0)
        return Advantages(whiten(raw, valid, signal.global_sum) if self.whitened else raw, returns)


def _whitened(raw: Tensor, signal: RewardSignal) -> Tensor:
    rewarded = signal.rewarded[:, None]
    moments = global_moments(raw, signal.valid_tokens & rewarded, signal.global_sum)
    centred = torch.where(rewarded, torch.where(moments.spread, moments.deviation, 0.0), raw.double())
    scaled = centred / torch.where(moments.spread, moments.std(), 1.0)
    return torch.where(signal.valid_tokens, scaled, 0.0).to(raw.dtype)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": PerRow(grpo),
    "dr_grpo": PerRow(dr_grpo),
    "rloo": PerRow(rloo),
    "maxrl": PerRow(maxrl),
    "opo": OPO(),
    "reinforce": PerRow(reinforce),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline(),
    "remax": ReMax(),
    "gae": GAE(),
}


def resolve_advantages(advantages: Estimator | RowFunction | str) -> Estimator:
    """An estimator from an object, a function or a known name.

    Raises:
        ValueError: if the name is unknown, or for a class instead of an object; the message says what to pass.
    """
    if isinstance(advantages, Estimator):
        return advantages
    if isinstance(advantages, type):
        raise ValueError(f"expected an object as advantages, got the class {advantages.__name__}: call it")
    if callable(advantages):
        return PerRow(advantages)
    if advantages not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise ValueError(f"expected advantages out of {known}, an object or a function, got {advantages!r}")
    return ESTIMATORS[advantages]
