r"""Stop properly: scale or replace the reward of truncated responses.

.. math::
    s_b \leftarrow \begin{cases} \alpha\, s_b \ \text{ or } \ s_{\text{cut}} &
    \text{finish}_b \in \{\text{length}, \text{turns}\} \\ s_b & \text{otherwise} \end{cases}

Scaling requires rewards of at least 0: it would raise a negative reward. For rewards that may be negative, pass a
``reward`` not above the smallest of them. A smaller reward ends the run. The new reward takes the place of the raw one
before normalization. Unlike with :class:`~lightning_rl.callbacks.NoEOSMask`, the row stays in the statistics of its
group, so the policy learns to stop. Combining the two raises an error.

Source: NVIDIA 2025 (ProRL v2), its stop-properly penalty; prolonged training: Liu et al. 2025, arXiv:2505.24864.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.reward_domain import RewardDomain
from lightning_rl.utils.arguments import check_numbers


class StopProperly(RLCallback):
    """Reduced reward for responses that a limit of tokens or turns ended.

    Logs their fraction as ``stop_properly/truncated``.

    Args:
        scale: Factor on their reward, in [0, 1]; 1 changes nothing.
        reward: Replacement of their reward, which overrides ``scale``; None to scale.

    Raises:
        ValueError: If the scale is outside [0, 1] or the reward is not finite; at setup, if there is a NoEOSMask.
    """

    name = "stop_properly"
    scales_rewards = True
    idle_beside = ("no_eos_mask",)

    def __init__(self, scale: float = 0.0, *, reward: float | None = None) -> None:
        check_numbers(at_least=0, at_most=1, scale=scale)
        check_numbers(finite=True, optional=True, reward=reward)
        if reward is not None or scale < 1:
            cure = "pass reward= not above the smallest reward that a response can get"
            self.domain = RewardDomain(0.0 if reward is None else reward, cure)
        self.scale = scale
        self.reward = reward

    @override
    def replace_reward(self, rollout: Rollout) -> Float[Tensor, " B"]:
        reduced = self.scale * rollout.rewards if self.reward is None else self.reward
        return torch.where(rollout.truncated, reduced, rollout.rewards)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"stop_properly/truncated": Stat.of(rollout.truncated, rollout.real)}
