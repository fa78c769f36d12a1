"""OptimalTokenBaseline: a baseline per group and step, weighted by the squared gradient norms of the rows."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.rollout import SUM_PI_SQUARED
from lightning_rl.signal.discounted_returns import discounted_returns
from lightning_rl.signal.importance_ratios import clipped_weight
from lightning_rl.signal.masked import are_equal, group_index, masked_fill_invalid, prefix_sums
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_bools, check_numbers

SQUARES = f"token_extras/{SUM_PI_SQUARED}"
ROUNDINGS = 8  # tolerance in units of eps


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalTokenBaseline(Estimator):
    r"""Reward from each token on, minus the baseline that minimizes the variance of the group's gradient.

    .. math:: A_{i,t} = G_{i,t} - \frac{\sum_j W_{j,t} G_{j,t}}{\sum_j W_{j,t}}, \qquad
              W_{j,t} = \sum_{s \le t} \big(1 - 2\pi_{j,s} + \textstyle\sum_v \pi_{j,s}(v)^2\big)

    The sums run over the rewarded rows of the group that have a step t. The bracket is the squared norm of the gradient
    of a log-probability with respect to the logits. Tokens of tools and environments are not steps. If the rewards
    of the group from a step on are equal, as they are for a single row, advantages are 0 there.

    A row that is not rewarded enters no baseline and has none; it keeps its token rewards, such as a KL, and its
    bonuses.

    Helps if responses are long and few per prompt, where the group mean leaves most of the variance. Needs one more
    pass through the vocabulary head before the update.

    Source: Li et al. 2026 (Optimal Token Baseline), arXiv:2602.07078; the logit-gradient proxy is its approximation.

    Args:
        bare_tail: Give tokens that only the longest row of a group has a baseline of 0 instead of an advantage of 0,
            unless all rewards of the group are equal.
        importance_cap: Cap on the ratio of the policy to the engine, whose square multiplies the bracket; None for no
            ratio. For use with the weights of :class:`~lightning_rl.callbacks.TruncatedIS`.

    Raises:
        ValueError: If ``importance_cap`` is not positive.
    """

    per_token: ClassVar[bool] = True

    within_groups = True

    bare_tail: bool = True
    importance_cap: float | None = None
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)  # pyrefly: ignore[bad-override]
    shift_invariant: bool = field(init=False, repr=False, compare=False)  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the options and set ``reads`` and ``shift_invariant``."""
        check_bools(bare_tail=self.bare_tail)
        check_numbers(above=0, optional=True, importance_cap=self.importance_cap)
        ratio = () if self.importance_cap is None else ("rollout_logprobs",)
        object.__setattr__(self, "reads", ("old_logprobs", SQUARES, *ratio))
        object.__setattr__(self, "shift_invariant", not self.bare_tail)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        valid, rewarded = signal.valid_tokens, signal.rewarded
        old = signal.require("old_logprobs", "OptimalTokenBaseline")
        sizes = logit_gradients(old, signal.require("sum_pi_squared", "OptimalTokenBaseline"))
        if self.importance_cap is not None:
            rollout = signal.require("rollout_logprobs", "OptimalTokenBaseline with importance_cap")
            sizes = sizes * clipped_weight(old, rollout, minimum=0.0, maximum=self.importance_cap).square()
        steps = (valid.cumsum(-1) - 1).clamp(min=0)
        returns = discounted_returns(signal.shaped, valid)
        advantages = minus_optimal_baseline(returns, sizes, valid & rewarded[:, None], signal.groups, steps)
        if self.bare_tail:
            differs = group_statistics(signal.scores, signal.groups, rewarded).spread
            tail = beyond_the_others(valid & rewarded[:, None], signal.groups, steps) & differs[:, None]
            advantages = torch.where(tail, returns, advantages)
        return Advantages(torch.where(rewarded[:, None], advantages, returns))


def logit_gradients(logprobs: Float[Tensor, "B T"], sum_pi_squared: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    r"""Return the squared norm of the gradient of each log-probability with respect to its logits.

    It is :math:`\lVert e - \pi \rVert^2 = 1 - 2\pi + \sum_v \pi(v)^2`, with e the unit vector of the token, computed as
    :math:`(1 - \pi)^2 + \sum_{v \ne o} \pi(v)^2` in float64. If the second term, a difference of the inputs, is not
    above their rounding error, it is bounded by the first term.

    Args:
        logprobs: Log-probabilities of the tokens, shape [B, T].
        sum_pi_squared: Sum of the squared probabilities of the vocabulary, shape [B, T].
    """
    exact = logprobs.double()
    rest = torch.expm1(exact).square()
    others = (sum_pi_squared.double() - (2 * exact).exp()).clamp(min=0)
    rounding = ROUNDINGS * torch.finfo(sum_pi_squared.dtype).eps
    return rest + torch.where(others > rounding, others, torch.minimum(others, rest))


def minus_optimal_baseline(
    returns: Float[Tensor, "B T"],
    sizes: Float[Tensor, "B T"],
    counted: Bool[Tensor, "B T"],
    groups: Int[Tensor, " B"],
    steps: Int[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Return returns minus the weighted mean over the group at the same step, in float64.

    The weight of a row is the sum of its sizes up to the step; if all of them are 0, rows have equal weights.

    Args:
        returns: Reward from each token on, shape [B, T].
        sizes: Squared gradient norm of each token, shape [B, T].
        counted: Tokens that take part, shape [B, T]; the others get 0.
        groups: Prompt index of each row, shape [B].
        steps: Index of each token among the steps of its row, from 0 to T - 1, shape [B, T].
    """
    place, number = _places(groups, steps)
    exact = masked_fill_invalid(returns, counted).double()
    weights = prefix_sums(masked_fill_invalid(sizes, counted).double()) * counted

    def extreme(fill: float, reduce: str) -> Tensor:
        values = torch.where(counted, exact, fill).flatten()
        return values.new_full((number,), fill).scatter_reduce(0, place, values, reduce)[place].view_as(exact)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(number).index_add(0, place, values.flatten())[place].view_as(values)

    weights = torch.where(total(weights) > 0, weights, counted.double())
    baseline = total(weights * exact) / total(weights).clamp(min=torch.finfo(torch.float64).tiny)
    differs = counted & ~are_equal(extreme(-torch.inf, "amax"), extreme(torch.inf, "amin"))
    return torch.where(differs, exact - baseline, 0.0).to(returns.dtype)


def beyond_the_others(
    counted: Bool[Tensor, "B T"], groups: Int[Tensor, " B"], steps: Int[Tensor, "B T"]
) -> Bool[Tensor, "B T"]:
    """Return the tokens whose step only one row of the group has, in groups with more than one row with tokens."""
    place, number = _places(groups, steps)
    index, rows = group_index(groups)
    here = torch.zeros(number, dtype=torch.int64, device=place.device).index_add(0, place, counted.flatten().long())
    others = torch.zeros(rows, dtype=torch.int64, device=place.device).index_add(0, index, counted.any(-1).long())
    return counted & (here[place].view_as(counted) == 1) & (others[index] > 1)[:, None]


def _places(groups: Int[Tensor, " B"], steps: Int[Tensor, "B T"]) -> tuple[Int[Tensor, " N"], int]:
    """Return the flat index of each token's group and step, and the number of such indices."""
    index, number = group_index(groups)
    width = steps.shape[1]
    return (index[:, None] * width + steps).flatten(), number * width
