r"""No-EOS mask: a response that was cut off gets no reward, and enters no reward statistic.

.. math::
    \text{rewarded}_b = [\text{finish}_b \notin \{\text{length}, \text{turns}\}]

What counts is the engine's finish reason, or that the limit of turns ended a conversation, never the padded width. The
row's task part is 0 *after* normalisation, so the other rows of its group are normalised without it; with a critic its
KL and value parts remain. Its tokens stay in the denominator of the loss, unless ``drop_tokens`` makes the row leave
training altogether.

Source: Yu et al. 2025 (DAPO, overlong filtering), arXiv:2503.14476, section 3.4.
"""

from typing import Literal

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout

Action = Literal["zero_reward", "drop_tokens"]


class NoEOSMask(RLCallback):
    """Takes truncated responses out of the reward. Logs ``no_eos_mask/truncated``, their share of the responses.

    Args:
        action: ``"zero_reward"`` keeps the row's tokens in training and in the denominator; ``"drop_tokens"`` takes
            them out of both.

    Raises:
        ValueError: if the action is unknown.
    """

    name = "no_eos_mask"

    def __init__(self, action: Action = "zero_reward") -> None:
        check_choices(("zero_reward", "drop_tokens"), action=action)
        self.action = action

    @override
    def reward_mask(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return ~rollout.cut_off

    @override
    def exclude(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return rollout.cut_off & (self.action == "drop_tokens")

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"no_eos_mask/truncated": Stat.of(rollout.cut_off, rollout.real)}
