r"""Total-variation mask: in a response that is too far off, keep only the tokens that bring the policies together.

.. math::
    \text{keep } (b, t) \iff \frac{1}{|o_b|} \sum_u |r_{b,u} - 1| \le \delta
    \ \text{ or }\ \operatorname{sign}(r_{b,t} - 1)\, A_{b,t} \le 0,
    \qquad r_{b,t} = \frac{\pi(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}

Half of the mean of :math:`|r - 1|` over the engine's samples estimates the total variation, here from the tokens of one
response. Beyond the bound a token that is already likelier than at the engine is not made likelier still, and a less
likely one not less likely; all others go on training. What is left out still counts in the denominator.

Source: Honari et al. 2026 (VACO), arXiv:2603.01365, its filter of the gradient.
"""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices, check_numbers
from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.ratios import policy_ratio


class TotalVariationMask(RLCallback):
    """Masks tokens that would widen a gap which is too wide.

    Logs ``total_variation_mask/distance`` and ``total_variation_mask/distance_max``, the mean of :math:`|r - 1|` of a
    response before the mask, and the core's ``total_variation_mask/rejected_tokens``.

    Args:
        bound: largest mean of :math:`|r - 1|` at which every token is kept, twice the total variation, at least 0.
        policy: the one above the ratio: before the update (mismatch with the engine, and staleness), or the one being
            trained, which adds what the update has done so far.

    Raises:
        ValueError: if the bound is negative or the policy unknown.
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
        above = view.require("old_logprobs") if self.policy == "old" else view.logprobs.detach()
        return policy_ratio(above, view.require("rollout_logprobs"))
