"""REINFORCE++: returns per token, whitened over the batch, with or without a group baseline."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.advantages.group_relative import DrGRPO
from lightning_rl.signal.discounted_returns import check_decay, discounted_returns
from lightning_rl.signal.masked import global_moments
from lightning_rl.utils.arguments import check_bools


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus(Estimator):
    r"""Discounted returns of the shaped reward, whitened over all valid tokens of rewarded rows.

    .. math::
        A_t = \frac{G_t - \mu}{\sigma}, \qquad G_t = \sum_{l \ge 0} \gamma^l\, r_{t+l}, \qquad
        \mu, \sigma\ \text{over all tokens of the batch}

    For rows that are not rewarded, penalties are scaled and not shifted.

    Source: Hu et al. 2025, arXiv:2501.03262.

    Args:
        gamma: Discount of a step, in [0, 1].
        turn_rewards: Place turn rewards of an environment at their turns instead of at the end of the row. With
            ``gamma=1`` the return of a token is then the reward of its turn and of later ones.

    Raises:
        ValueError: If ``gamma`` is outside [0, 1].
    """

    per_token: ClassVar[bool] = True

    gamma: float = 1.0
    turn_rewards: bool = False  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the options."""
        check_decay(gamma=self.gamma)
        check_bools(turn_rewards=self.turn_rewards)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return _whiten(discounted_returns(signal.shaped, signal.valid_tokens, gamma=self.gamma), signal)


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(Estimator):
    r"""Score minus the mean of its group, plus each token's reward, whitened over all valid tokens.

    .. math::
        A_{i,t} = \frac{x_{i,t} - \mu}{\sigma}, \qquad x_{i,t} = s_i - \bar s + r_{i,t}, \qquad
        \mu, \sigma\ \text{over all tokens of the batch}

    Source: Hu et al. 2025, arXiv:2501.03262, the variant with a group baseline.
    """

    per_token: ClassVar[bool] = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        centered = DrGRPO().per_row(signal.scores, signal.groups, signal.rewarded)
        return _whiten(signal.spread_out(centered) + signal.token_rewards, signal)


def _whiten(raw: Tensor, signal: RewardSignal) -> Advantages:
    rewarded = signal.rewarded[:, None]
    moments = global_moments(raw, signal.valid_tokens & rewarded, signal.global_sum)
    centered = torch.where(rewarded, torch.where(moments.spread, moments.deviation, 0.0), raw.double())
    scaled = centered / torch.where(moments.spread, moments.std(), 1.0)
    return Advantages(torch.where(signal.valid_tokens, scaled, 0.0).to(raw.dtype))
