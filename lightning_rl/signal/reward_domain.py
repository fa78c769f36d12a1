"""RewardDomain: the rewards for which a correction or an estimator is defined."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUNDING = 1e-6  # of a reward relative to the minimum


@dataclass(frozen=True, slots=True)
class RewardDomain:
    """Smallest reward for which a correction or an estimator is defined.

    Args:
        minimum: Smallest reward.
        cure: Advice if a reward is smaller.

    Example:
        >>> domain = RewardDomain(0.0, "add 1 to the rewards")
        >>> domain.check("MaxRL", torch.tensor([1.0, -1.0]), torch.tensor([True, True]), torch.tensor([4, 5]))
        Traceback (most recent call last):
        ...
        ValueError: expected rewards of at least 0 for MaxRL, got -1 for sample 5: add 1 to the rewards
    """

    minimum: float
    cure: str

    def check(
        self, who: str, rewards: Float[Tensor, " B"], rewarded: Bool[Tensor, " B"], sample_ids: Int[Tensor, " B"]
    ) -> None:
        """Raise an error that names a rewarded sample whose reward is too small.

        Args:
            who: Name of the correction or estimator.
            rewards: Reward of each row.
            rewarded: Rows that have a reward.
            sample_ids: Id of each row.

        Raises:
            ValueError: If a reward is below the minimum.
        """
        known = torch.where(rewarded, rewards.double(), torch.inf)
        if len(known) and (lowest := float(known.min())) < self.minimum - ROUNDING * max(1.0, abs(self.minimum)):
            sample = int(sample_ids[known.argmin()])
            raise ValueError(
                f"expected rewards of at least {self.minimum:g} for {who}, got {lowest:g} for sample {sample}: "
                f"{self.cure}"
            )
