r"""Total-variation mask: in responses far from the engine's policy, mask tokens that would increase the distance.

.. math::
    \text{keep } (b, t) \iff \frac{1}{|o_b|} \sum_u |r_{b,u} - 1| \le \delta
    \ \text{ or }\ \operatorname{sign}(r_{b,t} - 1)\, A_{b,t} \le 0,
    \qquad r_{b,t} = \frac{\pi(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}

Half the mean of :math:`|r - 1|` over samples of the engine estimates the total variation; here the mean is over one
response. Beyond the bound, a token with :math:`r > 1` is not made more likely and one with :math:`r < 1` is not made
less likely. Masked tokens still count in the denominator.

Source: Honari et al. 2026 (VACO), arXiv:2603.01365, its filter of the gradient.
"""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.masked import row_mean
from lightning_rl.utils.arguments import check_choices, check_numbers


class TotalVariationMask(RLCallback):
    """Mask on tokens whose gradient would increase a large total variation.

    Logs ``total_variation_mask/distance`` and ``total_variation_mask/distance_max``, the mean of :math:`|r - 1|` of a
    response before masking, and ``total_variation_mask/rejected_tokens``.

    Args:
        bound: Largest mean of :math:`|r - 1|` at which every token is kept (twice the total variation), at least 0.
        policy: Numerator of the ratio: ``"old"``, the policy before the update (mismatch and staleness), or
            ``"current"``, the policy being trained, which adds the drift of the update.

    Raises:
        ValueError: If the bound is negative or the policy is unknown.
    """

    name = "total_variation_mask"

    def __init__(self, bound: float, *, policy: Literal["old", "current"] = "old") -> None:
        check_numbers(at_least=0, bound=bound)
        check_choices(("old", "current"), policy=policy)
        self.bound = bound
        self.policy = policy
        self.reads_at_loss = ("old_logprobs", "rollout_logprobs") if policy == "old" else ("rollout_logprobs",)

    @override
    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        near = (self._distance(view) <= self.bound)[:, None]
        return near | ((self._ratio(view) - 1).sign() * view.require("advantages") <= 0)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = Stat.of(self._distance(view), view.trained)
        return {"total_variation_mask/distance": raw, "total_variation_mask/distance_max": raw.maximum()}

    def _distance(self, view: LossView) -> Float[Tensor, " B"]:
        return row_mean((self._ratio(view) - 1).abs(), view.valid_tokens)

    def _ratio(self, view: LossView) -> Float[Tensor, "B T"]:
        numerator = view.require("old_logprobs") if self.policy == "old" else view.logprobs.detach()
        return policy_ratio(numerator, view.require("rollout_logprobs"))
