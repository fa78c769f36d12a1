r"""Stop properly: a response that was cut off keeps a part of its reward, or gets another one.

.. math::
    s_b \leftarrow \begin{cases} \alpha\, s_b \ \text{ or } \ s_{\text{cut}} &
    \text{finish}_b \in \{\text{length}, \text{turns}\} \\ s_b & \text{otherwise} \end{cases}

The factor is for rewards of at least 0, as in the source: it brings a negative one closer to 0, so that a wrong answer
that was cut off would be better off than one that stopped. Where rewards may be negative, give a new one that is at or
below the least of them. Contributed as a bonus, the difference to the raw reward, before any normalisation. Unlike
:class:`~lightning_rl.callbacks.NoEOSMask`, which leaves the row out of the statistics of its group, the row takes part
with its new reward, so that the policy learns to stop. Beside it there would be nothing to change, which is refused.

Source: NVIDIA 2025 (ProRL v2), its stop-properly penalty; prolonged training: Liu et al. 2025, arXiv:2505.24864.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import masked_fill_invalid


class StopProperly(RLCallback):
    """Scales or replaces the reward of responses that a limit of tokens or turns ended.

    Logs ``stop_properly/truncated``, their share.

    Args:
        scale: what their reward is multiplied with, in [0, 1]; 1 changes nothing. For rewards of at least 0.
        reward: what they get instead, whatever the scale; None to scale.

    Raises:
        ValueError: if the scale lies outside [0, 1] or the reward is no finite number, or at setup beside a NoEOSMask.
    """

    name = "stop_properly"
    scales_rewards = True
    idle_beside = ("no_eos_mask",)

    def __init__(self, scale: float = 0.0, *, reward: float | None = None) -> None:
        check_numbers(at_least=0, at_most=1, scale=scale)
        check_numbers(finite=True, optional=True, reward=reward)
        self.scale = scale
        self.reward = reward

    @override
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        raw = masked_fill_invalid(rollout.rewards, rollout.rewarded)
        wanted = self.scale * raw if self.reward is None else torch.full_like(raw, self.reward)
        return torch.where(rollout.cut_off & rollout.rewarded, wanted - raw, 0.0)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"stop_properly/truncated": Stat.of(rollout.cut_off, rollout.real)}
