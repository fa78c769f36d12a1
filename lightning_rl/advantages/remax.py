"""ReMax: REINFORCE with the score of a greedy answer as baseline."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.signal.discounted_returns import discounted_returns


@dataclass(frozen=True, slots=True)
class ReMax(Estimator):
    r"""Reward from each token on, minus the score of the greedy answer to the same prompt.

    .. math::
        A_{i,t} = \sum_{l \ge 0} r_{i,t+l} - s^{\text{greedy}}

    Needs one more request per prompt for the greedy answer, which is not trained on. Rows whose greedy answer has no
    reward are not rewarded.

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
