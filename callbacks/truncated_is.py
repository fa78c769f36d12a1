r"""Truncated importance sampling: correct for the mismatch between the engine and the trainer before the update.

.. math::
    w_{b,t} = \min\Bigl(\frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})},\ C\Bigr)
    \qquad\text{or}\qquad
    w_b = \min\Bigl(\prod_t \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})},\ C\Bigr)

with :math:`\pi_{\text{old}}` the trainer's policy before the update. Its ratio old/rollout chains with the ratio
current/old of PPO's loss, so no policy counts twice. The weight multiplies the policy loss; the denominator does not
change.

Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; sequence form: Liu
et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices, check_numbers
from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.ratios import clipped_weight, policy_ratio, sequence_ratio

CAPS = {"token": 2.0, "sequence": 5.0}


class TruncatedIS(RLCallback):
    """Weighs samples of the engine as samples of the trainer's policy before the update.

    Logs ``truncated_is/ratio`` and ``truncated_is/ratio_max`` of single tokens before the cap,
    ``truncated_is/capped``, the fraction of tokens whose weight the cap lowered, and the core's
    ``truncated_is/weight_mean`` and ``truncated_is/ess``.

    Args:
        level: one weight for each token, or the product of a row's ratios as one weight for all of its tokens.
        cap: upper bound C; by default 2 for tokens and 5 for sequences.

    Raises:
        ValueError: if the level is unknown or the cap is below 1.
    """

    name = "truncated_is"
    reads_at_loss = ("old_logprobs", "rollout_logprobs")
    ratio = ("old", "rollout")
    alternative = "a mask such as SequenceRatioMask, which carries no ratio,"

    def __init__(self, level: Literal["token", "sequence"] = "token", *, cap: float | None = None) -> None:
        check_choices(CAPS, level=level)
        check_numbers(at_least=1, optional=True, cap=cap)
        self.level = level
        self.cap = CAPS[level] if cap is None else cap

    @override
    def token_weight(self, view: LossView) -> Float[Tensor, "B T"]:
        old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
        if self.level == "token":
            return clipped_weight(old, rollout, minimum=0.0, maximum=self.cap)
        weight = sequence_ratio(old, rollout, view.valid_tokens, geometric=False).clamp(max=self.cap)
        return weight[:, None].expand_as(old)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
        ratio = policy_ratio(old, rollout)
        compared = ratio
        if self.level == "sequence":
            compared = sequence_ratio(old, rollout, view.valid_tokens, geometric=False)[:, None].expand_as(old)
        raw = Stat.of(ratio, view.valid_tokens)
        return {
            "truncated_is/ratio": raw,
            "truncated_is/ratio_max": raw.maximum(),
            "truncated_is/capped": Stat.of(compared > self.cap, view.valid_tokens),
        }
