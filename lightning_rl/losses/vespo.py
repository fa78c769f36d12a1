"""VESPO: policy gradient with a smooth weight per response, which decays on both sides of a ratio of 1."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, Stat
from lightning_rl.losses.policy_loss import PolicyLoss
from lightning_rl.signal.importance_ratios import policy_ratio, sequence_log_ratio
from lightning_rl.utils.arguments import check_choices, check_numbers


@dataclass(frozen=True, kw_only=True)
class VESPO(PolicyLoss):
    r"""Policy gradient weighted by a soft kernel of the product of a response's ratios.

    .. math::
        \ell = -\operatorname{sg}[\varphi(w_b)]\, A \log p, \qquad
        \varphi(w) = w^{k} e^{\lambda (1 - w)}, \qquad
        w_b = \prod_t \frac{\pi_\theta(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}

    The weight is 1 at a ratio of 1, peaks at :math:`k / \lambda` and decays to 0 on both sides. The ratio to the
    engine's policy covers the update, staleness and the mismatch of engine and trainer. Logs the weights of valid
    tokens as ``policy/weight`` and ``policy/weight_max``.

    Source: Shen et al. 2026 (VESPO), arXiv:2602.10693, its closed-form kernel, with a power and a rate for each sign of
    the advantage.

    Args:
        k_positive: Power of the ratio for advantages of at least 0, at least 0.
        lambda_positive: Rate at which large ratios decay for advantages of at least 0, above 0.
        k_negative: Power of the ratio for negative advantages, at least 0.
        lambda_negative: Rate at which large ratios decay for negative advantages, above 0.
        anchor: Denominator of the ratio: ``"rollout"``, the engine's policy, or ``"old"``, the policy before the
            update, which ignores staleness: with one optimizer step per rollout every weight is 1.

    Raises:
        ValueError: If an option is out of range.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    anchor: Literal["old", "rollout"] = "rollout"

    def __post_init__(self) -> None:
        """Check the options and set ``ratio`` and ``reads``."""
        check_numbers(at_least=0, finite=True, k_positive=self.k_positive, k_negative=self.k_negative)
        check_numbers(above=0, finite=True, lambda_positive=self.lambda_positive, lambda_negative=self.lambda_negative)
        check_choices(("old", "rollout"), anchor=self.anchor)
        object.__setattr__(self, "ratio", ("current", self.anchor))
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    def weights(self, view: LossView) -> Float[Tensor, "B T"]:
        """Return the weight of each token, that of its response for the sign of its advantage, without gradient."""
        anchor, advantages = view.require(f"{self.anchor}_logprobs"), view.require("advantages")
        exponent = sequence_log_ratio(view.logprobs.detach(), anchor, view.valid_tokens, geometric=False)[:, None]
        ratio = policy_ratio(exponent, torch.zeros_like(exponent))
        good, bad = (
            torch.exp(k * ratio.log() + rate * (1 - ratio))
            for k, rate in ((self.k_positive, self.lambda_positive), (self.k_negative, self.lambda_negative))
        )
        return torch.where(advantages >= 0, good, bad)

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        return -self.weights(view) * view.require("advantages") * view.logprobs

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        weight = Stat.of(self.weights(view), view.valid_tokens)
        return {"policy/weight": weight, "policy/weight_max": weight.maximum()}
