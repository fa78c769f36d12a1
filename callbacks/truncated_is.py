r"""Truncated importance sampling: correct for the mismatch between engine and trainer before the update.

.. math::
    w_{b,t} = \operatorname{clip}(r_{b,t}, c, C) \qquad\text{or}\qquad
    w_b = \operatorname{clip}\Bigl(\prod_t r_{b,t},\, c,\, C\Bigr) \qquad\text{or}\qquad
    w_b = \operatorname{clip}\Bigl(\bigl(\textstyle\prod_t r_{b,t}\bigr)^{1/|o_b|},\, c,\, C\Bigr),
    \qquad r_{b,t} = \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}

with :math:`\pi_{\text{old}}` the trainer's policy before the update. The ratio old/rollout composes with the ratio
current/old of PPO's loss. The weight multiplies the policy loss; the denominator does not change. Masks such as
:class:`~lightning_rl.callbacks.SequenceRatioMask` and :class:`~lightning_rl.callbacks.DivergenceMask` multiply it. With
an infinite cap, a mask on the same ratio alone bounds the weight, as in IcePop.

Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; sequence form: Liu
et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.importance_ratios import policy_ratio, sequence_ratio
from lightning_rl.signal.masked import last_true, masked_fill_invalid
from lightning_rl.utils.arguments import check_bools, check_choices, check_numbers

CAPS = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}
KEY = "truncated_is_scale"


class TruncatedIS(RLCallback):
    """Truncated importance weight of the trainer's policy before the update over the engine's.

    Logs ``truncated_is/ratio`` and ``truncated_is/ratio_max`` of the tokens before truncation, the fraction of
    truncated weights as ``truncated_is/capped``, and ``truncated_is/weight_mean`` and ``truncated_is/ess``.

    Args:
        level: ``"token"`` for one weight per token; ``"sequence"`` for the product over a response, unbiased but of
            high variance; ``"geometric"`` for the geometric mean over a response.
        cap: Upper bound C; by default 2 for ``"token"`` and ``"geometric"``, and 5 for ``"sequence"``.
        floor: Lower bound c, in [0, 1]; 0 for none.
        normalized: Divide by the mean of the bounded weights over the rollout and all ranks (over tokens, or over
            responses with valid tokens), which keeps the step size.

    Raises:
        ValueError: If the level is unknown, the cap is below 1 or the floor is outside [0, 1].
    """

    name = "truncated_is"
    reads_at_loss = ("old_logprobs", "rollout_logprobs")
    ratio = ("old", "rollout")
    alternative = "a mask such as SequenceRatioMask, which carries no ratio,"

    def __init__(
        self,
        level: Literal["token", "sequence", "geometric"] = "token",
        *,
        cap: float | None = None,
        floor: float = 0.0,
        normalized: bool = False,
    ) -> None:
        check_choices(CAPS, level=level)
        check_numbers(at_least=1, optional=True, cap=cap)
        check_numbers(at_least=0, at_most=1, floor=floor)
        check_bools(normalized=normalized)
        self.level = level
        self.cap = CAPS[level] if cap is None else cap
        self.floor = floor
        self.normalized = normalized
        self.batch_statistics = normalized
        self.reads = self.reads_at_loss if normalized else ()
        self.provides = (f"extras/{KEY}",) if normalized else ()

    @property
    def token_wise(self) -> bool:  # pyrefly: ignore[bad-override]
        """True at the level of tokens."""
        return self.level == "token"

    @property
    @override
    def contributes(self) -> frozenset[str]:
        """Methods that the class overrides, without ``provide`` unless weights are normalized."""
        return super().contributes - (frozenset() if self.normalized else {"provide"})

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        valid = rollout.valid_tokens
        counted = valid if self.level == "token" else last_true(valid)  # one entry per token or per row
        weight = masked_fill_invalid(self._ratio(rollout).clamp(self.floor, self.cap), counted).double()
        total, number = self.collectives.sum(torch.stack([weight.sum(), counted.sum().double()]))
        scale = torch.where(total > 0, number / total, 1.0).to(rollout.rewards.dtype)
        return {f"extras/{KEY}": scale.expand(len(rollout)).clone()}

    @override
    def token_weight(self, view: LossView) -> Float[Tensor, "B T"]:
        weight = self._ratio(view).clamp(self.floor, self.cap)
        return weight * view.extras[KEY][:, None].to(weight.dtype) if self.normalized else weight

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        ratio = self._ratio(view)
        raw = Stat.of(policy_ratio(view.require("old_logprobs"), view.require("rollout_logprobs")), view.valid_tokens)
        return {
            "truncated_is/ratio": raw,
            "truncated_is/ratio_max": raw.maximum(),
            "truncated_is/capped": Stat.of((ratio > self.cap) | (ratio < self.floor), view.valid_tokens),
        }

    def _ratio(self, rows: Rollout) -> Float[Tensor, "B T"]:
        old, rollout = rows.require("old_logprobs").detach(), rows.require("rollout_logprobs").detach()
        if self.level == "token":
            return policy_ratio(old, rollout)
        ratio = sequence_ratio(old, rollout, rows.valid_tokens, geometric=self.level == "geometric")
        return ratio[:, None].expand_as(old)
