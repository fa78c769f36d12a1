"""DRO: the policy gradient with a quadratic leash to the policy that sampled, instead of an importance ratio."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices, check_numbers
from lightning_rl.corrections import LossView
from lightning_rl.losses.base import PolicyLoss
from lightning_rl.signal.kl import k2


@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    r"""The score-function loss and half the squared log-ratio to the policy that sampled.

    .. math::
        \ell_{b,t} = -A_{b,t} \log \pi_\theta(o_{b,t})
        + \frac{\beta}{2} \Bigl(\log \frac{\pi_\theta(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}\Bigr)^2

    It carries no ratio, so no variance grows with the age of the samples: for offline and very stale ones. The leash is
    on each token; the paper squares the log-ratio of the whole response, the sum over its tokens, whose gradient pulls
    every token by that sum where this one pulls each by its own.

    Source: Richemond et al. 2024 (DRO), arXiv:2405.19107, the gradient with respect to the policy, of each
    token instead of the whole response.

    Args:
        beta: strength of the leash, at least 0.
        anchor: the policy at its other end: ``"rollout"``, the engine's, which sampled, or ``"old"``, the trainer's
            before the update, where the first optimizer step of a rollout starts: with one step the leash does nothing.

    Raises:
        ValueError: if an option is out of range.
    """

    beta: float = 0.1
    anchor: Literal["old", "rollout"] = "rollout"

    def __post_init__(self) -> None:
        """Checks the options, and declares what it reads."""
        check_numbers(at_least=0, finite=True, beta=self.beta)
        check_choices(("old", "rollout"), anchor=self.anchor)
        object.__setattr__(self, "reads", (f"{self.anchor}_logprobs",))

    @override
    def __call__(self, view: LossView) -> Float[Tensor, "B T"]:
        leash = k2(view.logprobs, view.require(f"{self.anchor}_logprobs"))
        return -view.require("advantages") * view.logprobs + self.beta * leash
