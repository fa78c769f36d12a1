r"""Entropy bonus: add the policy's entropy to the objective, with a fixed or an adaptive coefficient.

.. math::
    \ell_{b,t} = -\alpha\, H\bigl(\pi_\theta(\cdot \mid o_{b,<t})\bigr), \qquad
    \alpha = c\,[\bar H \le \text{target}], \qquad c \leftarrow \max\bigl(c \pm \delta,\ 0\bigr)

Without a target, :math:`\alpha = c` is constant. With one, :math:`c` grows by :math:`\delta` after each optimizer step
whose mean entropy over all valid tokens and ranks is below the target, and shrinks otherwise. So :math:`\bar H` is
the entropy of the step before, and in the first step :math:`\alpha = c`.

Source: Williams and Peng 1991; adaptive: He et al. 2025 (Skywork-OR1), arXiv:2505.22312, section 4.5.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.corrections.stat import merge_moments
from lightning_rl.utils.arguments import check_numbers


class EntropyBonus(RLCallback):
    """Entropy of the policy as a term of the loss.

    Logs the coefficient of the step as ``entropy_bonus/coef`` and minus the entropy as ``entropy_bonus/loss``.

    Args:
        coef: Coefficient; its initial value if there is a target.
        target: Mean entropy to hold, in nats, above 0; None for a fixed coefficient.
        step: Change of the coefficient after each optimizer step, above 0; ignored without a target.

    Raises:
        ValueError: If an option is out of range.
    """

    name = "entropy_bonus"
    token_wise = True
    trains_entropy = True

    def __init__(self, coef: float = 0.01, *, target: float | None = None, step: float = 0.005) -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        check_numbers(above=0, finite=True, step=step)
        check_numbers(above=0, finite=True, optional=True, target=target)
        self.coef = coef
        self.target = target
        self.step = step
        self.entropy = -math.inf

    @property
    def alpha(self) -> float:
        """Coefficient of the entropy in the next step."""
        return 0.0 if self.resting else self.coef

    @property
    def resting(self) -> bool:
        """True if the mean entropy of the last step was above the target."""
        return self.target is not None and self.entropy > self.target

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=-view.entropy, coef=self.alpha)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"entropy_bonus/coef": Stat.of(torch.full_like(view.logprobs, self.alpha), view.valid_tokens)}

    @override
    def after_step(self, outputs: Mapping[str, Tensor]) -> None:
        if self.target is not None and "policy/entropy" in outputs:
            self.adapt(torch.stack(self.collectives.gather(outputs["policy/entropy"])))

    def adapt(self, moments: Tensor) -> None:
        """Update the coefficient from the entropy's moments on each rank, shape [ranks, 4]."""
        number, mean, *_ = merge_moments(moments).tolist()
        if self.target is None or not number:
            return
        self.coef = max(self.coef + (self.step if mean < self.target else -self.step), 0.0)
        self.entropy = mean

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.target is None else {"coef": self.coef, "entropy": self.entropy}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.target is None:
            return
        self.coef = state_dict["coef"]
        earlier = math.inf if state_dict.get("resting") else -math.inf  # checkpoints without the entropy
        self.entropy = state_dict.get("entropy", earlier)
