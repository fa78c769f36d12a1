"""Configuration: what turns a rollout into advantages, a loss and its gradient."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning.pytorch import Callback

from lightning_rl.advantages import Estimator
from lightning_rl.algorithm import Objective
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.losses import PolicyLoss, ValueFunction
from lightning_rl.module import RLLightningModule
from lightning_rl.recording.serialize import described, rebuilt
from lightning_rl.signal.reductions import Reduction

BENDING = frozenset(
    (
        "reward_mask",
        "reward_bonus",
        "exclude",
        "token_reward",
        "sequence_mask",
        "token_mask",
        "token_weight",
        "loss_term",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The part of a run that bends the signal.

    Args:
        estimator: from rewards to advantages.
        loss: of the policy.
        reduction: how tokens are weighed.
        entropy_coef: what the entropy bonus is multiplied with.
        value_coef: what the critic's loss is multiplied with.
        value_loss: of the critic at each token.
        callbacks: the corrections that change a reward, an advantage or the loss.
    """

    estimator: Estimator
    loss: PolicyLoss
    reduction: Reduction
    entropy_coef: float
    value_coef: float
    value_loss: ValueFunction
    callbacks: tuple[RLCallback, ...]

    @staticmethod
    def of(module: RLLightningModule, callbacks: Iterable[Callback]) -> "Configuration":
        """That of a module with the callbacks of its Trainer."""
        return Configuration(
            estimator=module.estimator,
            loss=module.loss,
            reduction=module.reduction,
            entropy_coef=module.entropy_coef,
            value_coef=module.value_coef,
            value_loss=module.value_loss,
            callbacks=tuple(c for c in callbacks if isinstance(c, RLCallback) and c.contributes & BENDING),
        )

    def objective(self, contributions: Corrections) -> Objective:
        """The loss of an optimizer step, with the corrections given."""
        return Objective(
            loss=self.loss, reduction=self.reduction, contributions=contributions, entropy_coef=self.entropy_coef,
            value_coef=self.value_coef, value_loss=self.value_loss,
        )  # fmt: skip

    def described(self) -> dict[str, Any]:
        """As plain JSON."""
        values = {spec.name: described(getattr(self, spec.name)) for spec in fields(self) if spec.name != "callbacks"}
        return {**values, "callbacks": {callback.name: described(callback) for callback in self.callbacks}}

    @staticmethod
    def rebuilt(description: Mapping[str, Any]) -> "Configuration":
        """The inverse of :meth:`described`."""
        values = {name: rebuilt(own) for name, own in description.items()}
        return Configuration(**{**values, "callbacks": tuple(values["callbacks"].values())})
