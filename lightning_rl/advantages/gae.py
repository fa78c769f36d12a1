"""GAE: generalized advantage estimation over tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.advantages.trace_decay import TraceDecay, check_trace_decay, decay_of
from lightning_rl.signal.discounted_returns import check_decay, gae
from lightning_rl.signal.masked import whiten
from lightning_rl.utils.arguments import check_bools


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(Estimator):
    r"""Generalized advantage estimation with a critic, as in PPO and VAPO.

    .. math::
        A_t = \sum_{l \ge 0} (\gamma \lambda)^l\, \delta_{t+l}, \qquad \delta_t = r_t + \gamma V_{t+1} - V_t

    Source: Schulman et al. 2015, arXiv:1506.02438; a decay of the critic's own, and one that follows the length: Yue et
    al. 2025 (VAPO), arXiv:2504.05118, sections 4.1 and 4.2.

    Args:
        gamma: Discount of a step, in [0, 1].
        lam: Decay of later temporal differences, in [0, 1], or a function of the row's length:
            :class:`~lightning_rl.advantages.LengthAdaptive`, :class:`~lightning_rl.advantages.RelativePosition`.
        lam_critic: Decay for the critic's returns; None for ``lam``. With 1 they are Monte Carlo returns, without bias
            from the critic.
        whitened: Normalize advantages to mean 0 and standard deviation 1 over all valid tokens.
        turn_rewards: Place turn rewards of an environment at their turns instead of at the end of the row.

    Raises:
        ValueError: If ``gamma`` or a decay is outside [0, 1].
    """

    reads = ("values",)
    per_token: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float | TraceDecay = 1.0
    lam_critic: float | TraceDecay | None = None
    whitened: bool = True
    turn_rewards: bool = False  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the options."""
        check_decay(gamma=self.gamma)
        check_trace_decay(lam=self.lam, **({} if self.lam_critic is None else {"lam_critic": self.lam_critic}))
        check_bools(whitened=self.whitened, turn_rewards=self.turn_rewards)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        values, valid = signal.require("values", "GAE"), signal.valid_tokens

        def estimate(decay: float | TraceDecay) -> Tensor:
            return gae(signal.shaped, values, valid, gamma=self.gamma, lam=decay_of(decay, valid.sum(-1)))

        raw = estimate(self.lam)
        returns = (raw if self.lam_critic is None else estimate(self.lam_critic)) + torch.where(valid, values, 0.0)
        return Advantages(whiten(raw, valid, signal.global_sum) if self.whitened else raw, returns)
