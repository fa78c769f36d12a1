"""GAE: generalised advantage estimation with a critic."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from lightning_rl.advantages.base import Advantages, Estimator, RewardSignal
from lightning_rl.arguments import check_bools
from lightning_rl.signal.masked import whiten
from lightning_rl.signal.returns import check_decay, gae


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
        check_bools(whitened=self.whitened)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        if signal.values is None:
            raise ValueError("expected values for GAE, got none: pass critic= to the module")
        valid = signal.valid_tokens
        raw = gae(signal.shaped, signal.values, valid, gamma=self.gamma, lam=self.lam)
        returns = raw + torch.where(valid, signal.values, 0.0)
        return Advantages(whiten(raw, valid, signal.global_sum) if self.whitened else raw, returns)
