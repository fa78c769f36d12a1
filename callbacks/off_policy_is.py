r"""Off-policy importance sampling: weight each token by the ratio of the current policy to the engine's.

.. math::
    w_{b,t} = \operatorname{sg}\Bigl[\operatorname{clip}\Bigl(
    \frac{\pi_\theta(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})},\
    w_{\min},\ w_{\max}\Bigr)\Bigr]

The weight carries no gradient. With the ``reinforce`` loss this is CISPO anchored on the rollout. A loss with the ratio
:math:`\pi_\theta / \pi_{\text{old}}` would count :math:`\pi_\theta` twice, so that combination raises an error. The
denominator of the loss does not change.

Source: MiniMax 2025 (CISPO), arXiv:2506.13585, anchored on the policy that sampled.
"""

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.importance_ratios import clipped_weight, policy_ratio
from lightning_rl.utils.arguments import check_numbers


class OffPolicyIS(RLCallback):
    """Importance weight for losses without a ratio.

    Logs ``off_policy_is/ratio`` and ``off_policy_is/ratio_max`` before clipping, the fraction of clipped weights as
    ``off_policy_is/clipped``, and ``off_policy_is/weight_mean`` and ``off_policy_is/ess``.

    Args:
        min_ratio: Lower bound of the weight; 0 for none.
        max_ratio: Upper bound of the weight.

    Raises:
        ValueError: Unless ``0 <= min_ratio <= 1 <= max_ratio``.
    """

    name = "off_policy_is"
    token_wise = True
    reads_at_loss = ("rollout_logprobs",)
    ratio = ("current", "rollout")
    alternative = "TruncatedIS, whose ratio is old/rollout"

    def __init__(self, min_ratio: float = 0.0, max_ratio: float = 2.0) -> None:
        check_numbers(at_least=0, at_most=1, min_ratio=min_ratio)
        check_numbers(at_least=1, max_ratio=max_ratio)
        self.min_ratio = min_ratio
        self.max_ratio = max_ratio

    @override
    def token_weight(self, view: LossView) -> Float[Tensor, "B T"]:
        rollout = view.require("rollout_logprobs")
        return clipped_weight(view.logprobs, rollout, minimum=self.min_ratio, maximum=self.max_ratio)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = policy_ratio(view.logprobs.detach(), view.require("rollout_logprobs"))
        clipped = (ratio < self.min_ratio) | (ratio > self.max_ratio)
        raw = Stat.of(ratio, view.valid_tokens)
        return {
            "off_policy_is/ratio": raw,
            "off_policy_is/ratio_max": raw.maximum(),
            "off_policy_is/clipped": Stat.of(clipped, view.valid_tokens),
        }
