r"""Entropy bonus: reward uncertainty in the loss, with a fixed coefficient or one that holds a target.

.. math::
    \ell_{b,t} = -\alpha\, H\bigl(\pi_\theta(\cdot \mid o_{b,<t})\bigr), \qquad
    \alpha = c\,[\bar H \le \text{target}], \qquad c \leftarrow \max\bigl(c \pm \delta,\ 0\bigr)

Without a target the coefficient stays. With one it grows by :math:`\delta` after each optimizer step whose mean entropy
over all valid tokens and ranks lies below the target, and shrinks otherwise; above the target the bonus rests.

Source: Williams and Peng 1991; adaptive: He et al. 2025 (Skywork-OR1), arXiv:2505.22312, section 4.5.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.corrections.stat import merge_moments


class EntropyBonus(RLCallback):
    """Adds the policy's entropy to what is maximised.

    Logs ``entropy_bonus/coef``, the coefficient of the step, and the core's ``entropy_bonus/loss``, minus the entropy.

    Args:
        coef: the coefficient, or the one to begin with.
        target: mean entropy to hold, in nats, above 0; None for a fixed coefficient.
        step: how much the coefficient changes after each optimizer step, above 0; only with a target.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "entropy_bonus"
    trains_entropy = True

    def __init__(self, coef: float = 0.01, *, target: float | None = None, step: float = 0.005) -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        check_numbers(above=0, finite=True, step=step)
        check_numbers(above=0, finite=True, optional=True, target=target)
        self.coef = coef
        self.target = target
        self.step = step
        self.resting = False

    @property
    def alpha(self) -> float:
        """What the entropy of the next step is multiplied with."""
        return 0.0 if self.resting else self.coef

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=-view.entropy, coef=self.alpha)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"entropy_bonus/coef": Stat.of(torch.full_like(view.logprobs, self.alpha), view.valid_tokens)}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.target is None or not isinstance(outputs, Mapping) or "policy/entropy" not in outputs:
            return  # a fixed coefficient, or a step that was skipped
        self.adapt(torch.stack(self.collectives.gather(outputs["policy/entropy"])))

    def adapt(self, moments: Tensor) -> None:
        """Moves the coefficient after a step, given the entropy's moments on each rank, shape [ranks, 4]."""
        number, mean, *_ = merge_moments(moments).tolist()
        if self.target is None or not number:
            return
        self.coef = max(self.coef + (self.step if mean < self.target else -self.step), 0.0)
        self.resting = mean > self.target

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "resting": self.resting}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coef, self.resting = state_dict["coef"], state_dict["resting"]
