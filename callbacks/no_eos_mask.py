r"""No-EOS mask: give truncated responses no reward and leave them out of reward statistics.

.. math::
    \text{rewarded}_b = [\text{finish}_b \notin \{\text{length}, \text{turns}\}]

The finish reason decides: a limit of tokens or of turns ended the response. The row's task reward is left out of the
statistics of its group and is 0 *after* normalization; with a critic its KL and value parts remain. Its tokens stay in
the denominator of the loss unless ``drop_tokens`` excludes the row from training.

With a group estimator the advantage of a truncated row is 0, so nothing teaches the policy to end its responses, and a
policy whose responses are nearly all truncated learns nothing. A run warns once if most rows of a rollout are masked.
:class:`~lightning_rl.callbacks.StopProperly` counts truncated responses as failures instead.

Source: Yu et al. 2025 (DAPO, overlong filtering), arXiv:2503.14476, section 3.4.
"""

from typing import Literal

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.utils.arguments import check_choices

Action = Literal["zero_reward", "drop_tokens"]


class NoEOSMask(RLCallback):
    """Mask on the reward of truncated responses. Logs their fraction as ``no_eos_mask/truncated``.

    Args:
        action: ``"zero_reward"`` keeps the row's tokens in training and in the denominator; ``"drop_tokens"`` removes
            them from both.

    Raises:
        ValueError: If the action is unknown.
    """

    name = "no_eos_mask"

    def __init__(self, action: Action = "zero_reward") -> None:
        check_choices(("zero_reward", "drop_tokens"), action=action)
        self.action = action

    @override
    def reward_mask(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return ~rollout.truncated

    @override
    def exclude(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return rollout.truncated & (self.action == "drop_tokens")

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"no_eos_mask/truncated": Stat.of(rollout.truncated, rollout.real)}
