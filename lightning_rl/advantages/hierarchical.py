"""HierarchicalGRPO: attempts at a task of the policy compared with each other, and the rest of a sample as in GRPO."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.advantages.group_relative import GRPO, RLOO, DrGRPO
from lightning_rl.rollout import ROLES, role_number
from lightning_rl.signal.masked import are_equal, masked_fill_invalid
from lightning_rl.utils.arguments import check_text


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalGRPO(Estimator):
    r"""GRPO on two levels: attempts of one role within their sample, and all else between the samples of a prompt.

    .. math::
        A_{i,a} = \frac{r_{i,a} - \bar r_i}{\sigma_i + \epsilon}, \qquad
        A_i = \frac{p_i - \bar p}{\sigma + \epsilon}, \qquad p_i = s_i - \sum_a r_{i,a}

    For programs in which the policy proposes a task and then attempts it several times, as
    :class:`~lightning_rl.environments.Program`: a sample is one run. An attempt is a turn of ``role`` with all turns of
    that role that continue it, and its return r is the sum of their turn rewards. All its tokens have the advantage of
    this return over the other attempts of the sample. The tokens of other roles have that of the rest of the score,
    such as the proposal's turn reward, over the other samples of the prompt. A sample with one attempt, or with equal
    ones, does not train ``role``. Rows without roles are compared as in GRPO.

    Source: the hierarchical comparison of proposers and solvers in prime-rl (pull request 3138), which subtracts the
    mean alone: ``comparison=DrGRPO()``.

    Args:
        role: Name of the model in the calls of attempts.
        comparison: Estimator of both levels: GRPO, DrGRPO or RLOO.

    Raises:
        ValueError: If ``comparison`` is another estimator, or ``role`` is empty.
    """

    reads = (f"token_extras/{ROLES}",)
    within_groups = True
    shift_invariant = True
    turn_rewards: ClassVar[bool] = True  # pyrefly: ignore[bad-override]

    role: str = "solver"
    comparison: GRPO | DrGRPO | RLOO = field(default_factory=GRPO)

    def __post_init__(self) -> None:
        """Check the options."""
        check_text(role=self.role)
        if not isinstance(self.comparison, GRPO | DrGRPO | RLOO):
            raise ValueError(f"expected GRPO(), DrGRPO() or RLOO() as comparison, got {self.comparison!r}: pass one")

    @property
    @override
    def compares(self) -> bool:
        """False, as attempts of one sample have advantages in groups of one."""
        return False

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        compare, scores, rewarded = self.comparison.per_row, signal.scores, signal.rewarded
        if signal.roles is None or signal.attempts is None or signal.turn_rewards is None:
            return Advantages(signal.spread_out(compare(scores, signal.groups, rewarded)))
        ours = signal.valid_tokens & (signal.roles == role_number(self.role))
        rewards = masked_fill_invalid(signal.turn_rewards, ours).double()
        total = rewards.sum(-1).to(scores.dtype)
        rest = torch.where(are_equal(scores, total), 0.0, scores - total)
        advantages = signal.spread_out(compare(rest, signal.groups, rewarded))
        row, place = ours.nonzero(as_tuple=True)
        attempts, index = torch.stack([row, signal.attempts[row, place]]).unique(dim=1, return_inverse=True)
        returns = scores.new_zeros(attempts.shape[1], dtype=torch.float64).index_add_(0, index, rewards[row, place])
        of_attempts = compare(returns.to(scores.dtype), attempts[0], rewarded[attempts[0]])
        return Advantages(advantages.index_put((row, place), of_attempts[index]))
