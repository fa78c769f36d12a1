"""DRO: policy gradient with a quadratic penalty on the log-ratio instead of an importance ratio."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView
from lightning_rl.losses.policy_loss import PolicyLoss
from lightning_rl.signal.kl import k2
from lightning_rl.utils.arguments import check_choices, check_numbers


@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    r"""Score-function loss plus half the squared log-ratio to the policy that sampled.

    .. math::
        \ell_{b,t} = -A_{b,t} \log \pi_\theta(o_{b,t})
        + \frac{\beta}{2} \Bigl(\log \frac{\pi_\theta(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}\Bigr)^2

    Without an importance ratio the variance does not grow with staleness, which suits offline and very stale samples.
    The penalty is per token; the paper squares the sum of the log-ratios over the response.

    Source: Richemond et al. 2024 (DRO), arXiv:2405.19107, the gradient with respect to the policy, of each token
    instead of the whole response.

    Args:
        beta: Coefficient of the penalty, at least 0.
        anchor: Policy of the penalty: ``"rollout"``, the engine's, or ``"old"``, the trainer's before the update, for
            which the penalty has no effect on the first optimizer step of a rollout.

    Raises:
        ValueError: If an option is out of range.
    """

    token_wise: ClassVar[bool] = True
    beta: float = 0.1
    anchor: Literal["old", "rollout"] = "rollout"

    def __post_init__(self) -> None:
        """Check the options and set ``reads``."""
        check_numbers(at_least=0, finite=True, beta=self.beta)
        check_choices(("old", "rollout"), anchor=self.anchor)
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        penalty = k2(view.logprobs, view.require(f"{self.anchor}_logprobs"))
        return -view.require("advantages") * view.logprobs + self.beta * penalty
