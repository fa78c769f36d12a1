"""Subject: the parts of a run that a check may call again, without its model, its engine or its Trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_rl.advantages import Estimator, RawReward
from lightning_rl.algorithm import Objective
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.corrections.provided import Provided
from lightning_rl.losses import DEFAULT_VALUE_LOSS, ClippedSurrogate, FunctionLoss, PolicyLoss, ValueFunction
from lightning_rl.module import RLLightningModule
from lightning_rl.signal.reductions import Reduction, token_mean

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}  # nats, mean over tokens; coarser types below
COARSE = 0.1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Plain values of a run that checks compare with, and that a saved finding carries.

    Attributes:
        temperature: of sampling and of every log-probability.
        tolerance: nats by which two ways to compute a log-probability may differ on average.
        group_size: samples of each prompt.
        groups: groups of a rollout on this rank; 0 if unknown.
        max_new_tokens: most tokens of a response.
        max_staleness: how many rollouts old a token's weights may be.
        max_grad_norm: what the gradient norm is clipped to; infinity for no clipping.
        eos_ids: ids that end a response.
        stop_strings: whether strings may end a response too.
        packing: whether microbatches are free of padding.
        world_size: number of ranks.
        engine: name of the engine's class.
    """

    temperature: float = 1.0
    tolerance: float = TOLERANCE[torch.float32]
    group_size: int = 0
    groups: int = 0
    max_new_tokens: int = 2**31
    max_staleness: int = 0
    max_grad_norm: float = float("inf")
    eos_ids: tuple[int, ...] = ()
    stop_strings: bool = False
    packing: bool = True
    world_size: int = 1
    engine: str = "none"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked.

    Attributes:
        loss: of the policy.
        reduction: how tokens are weighed.
        estimator: from rewards to advantages.
        contributions: the corrections, without those that only look on.
        reward_weights: what each reward function is multiplied with, by name.
        text: a completion as the rewards see it, from its token ids; None if unknown.
        entropy_coef: of the module's own entropy bonus.
        value_coef: of the critic's loss.
        value_loss: of the critic.
        facts: plain values.
    """

    loss: PolicyLoss = field(default_factory=ClippedSurrogate)
    reduction: Reduction = token_mean
    estimator: Estimator = field(default_factory=RawReward)
    contributions: Corrections = field(default_factory=Provided)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    text: Callable[[Sequence[int]], str] | None = None
    entropy_coef: float = 0.0
    value_coef: float = 1.0
    value_loss: ValueFunction = DEFAULT_VALUE_LOSS
    facts: Facts = field(default_factory=Facts)

    @property
    def loss_name(self) -> str:
        """What findings call the loss: a function by its own name."""
        loss = self.loss.function if isinstance(self.loss, FunctionLoss) else self.loss
        return getattr(loss, "__name__", type(loss).__name__)

    @staticmethod
    def of(module: RLLightningModule, callbacks: Sequence[RLCallback], facts: Facts) -> "Subject":
        """The parts of a module with its corrections."""
        return Subject(
            loss=module.loss, reduction=module.reduction, estimator=module.estimator,
            contributions=Provided([c for c in callbacks if c.contributes - RLCallback.LOOKING]),
            reward_weights=module.rewards.weights, entropy_coef=module.entropy_coef, value_coef=module.value_coef,
            value_loss=module.value_loss, facts=facts,
        )  # fmt: skip

    def objective(self, contributions: Corrections | None = None) -> Objective:
        """The loss, with its corrections or with others."""
        return Objective(
            loss=self.loss, reduction=self.reduction, contributions=contributions or self.contributions,
            entropy_coef=self.entropy_coef, value_coef=self.value_coef, value_loss=self.value_loss,
        )  # fmt: skip

    def replaced(self, **changes: Any) -> "Subject":
        """A copy with other parts."""
        return replace(self, **changes)

    def offering(self, *methods: str) -> list[tuple[RLCallback, str]]:
        """Every correction with each of the methods that it offers."""
        return [(callback, method) for method in methods for callback in self.contributions.contributors(method)]


def facts_of(module: RLLightningModule) -> Facts:
    """The plain values of a module that is being fitted."""
    model, world = module.required_policy.model, module.parallel.ranks
    mixed = str(module.trainer.precision) not in ("32-true", "64-true")
    limit = module.max_grad_norm
    return Facts(
        temperature=module.temperature, tolerance=COARSE if mixed else TOLERANCE.get(model.dtype, COARSE),
        group_size=module.group_size, groups=module.prompt_stream.prompts_per_rollout // world,
        max_new_tokens=module.max_new_tokens, max_grad_norm=float("inf") if limit is None else limit,
        max_staleness=module.max_staleness, eos_ids=tuple(sorted(module.run.eos_ids)),
        stop_strings=bool(module.stop), packing=module.packing, world_size=world, engine=type(module.engine).__name__,
    )  # fmt: skip
