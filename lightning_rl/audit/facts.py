"""Facts: plain values of a run that checks compare with, and that a saved finding carries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_rl.advantages import Estimator, PerRow
from lightning_rl.algorithm import Objective
from lightning_rl.corrections import Contributions, RLCallback
from lightning_rl.corrections.provided import Provided
from lightning_rl.losses import DEFAULT_VALUE_LOSS, ClippedSurrogate, PolicyLoss, ValueFunction
from lightning_rl.module import RLLightningModule
from lightning_rl.signal.advantages import reinforce
from lightning_rl.signal.reductions import Reduction, token_mean

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}  # nats, mean over tokens; coarser types below
COARSE = 0.1


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run was told.

    Attributes:
        temperature: of sampling and of every log-probability.
        tolerance: nats by which two ways to compute a log-probability may differ on average.
        group_size: samples of each prompt.
        groups: groups of a rollout on this rank; 0 if unknown.
        max_new_tokens: bound of a response's length.
        max_staleness: how many rollouts old a token's weights may be.
        max_grad_norm: what the gradient norm is clipped to; infinity for no clipping.
        eos_ids: ids that end a response.
        stop_strings: whether strings may end a response too.
        packing: whether microbatches are free of padding.
        world_size: number of ranks.
        engine: name of the engine's class.
        reward_weights: what each reward function is multiplied with, by name.
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
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(module: RLLightningModule) -> "RunFacts":
        """Those of a module that is being fitted."""
        model, world = module.required_policy.model, module.parallel.ranks
        mixed = str(module.trainer.precision) not in ("32-true", "64-true")
        limit = module.max_grad_norm
        return RunFacts(
            temperature=module.temperature,
            tolerance=COARSE if mixed else TOLERANCE.get(model.dtype, COARSE),
            group_size=module.group_size,
            groups=module.prompt_stream.prompts_per_rollout // world,
            max_new_tokens=module.max_new_tokens,
            max_staleness=module.max_staleness,
            max_grad_norm=float("inf") if limit is None else limit,
            eos_ids=tuple(sorted(module.run.eos_ids)),
            stop_strings=bool(module.stop),
            packing=module.packing,
            world_size=world,
            engine=type(module.engine).__name__,
            reward_weights=dict(module.rewards.weights),
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked."""

    loss: PolicyLoss = field(default_factory=ClippedSurrogate)
    advantages: Estimator = field(default_factory=lambda: PerRow(reinforce))
    reduction: Reduction = token_mean
    corrections: Contributions = field(default_factory=Provided)
    entropy_coef: float = 0.0
    value_coef: float = 1.0
    value_loss: ValueFunction = DEFAULT_VALUE_LOSS

    @staticmethod
    def of(module: RLLightningModule, callbacks: Sequence[RLCallback]) -> "Subject":
        """The parts of a module with its corrections."""
        return Subject(
            loss=module.loss,
            advantages=module.estimator,
            reduction=module.reduction,
            corrections=Provided([c for c in callbacks if c.contributes - RLCallback.LOOKING]),
            entropy_coef=module.entropy_coef,
            value_coef=module.value_coef,
            value_loss=module.value_loss,
        )

    def objective(self, corrections: Contributions | None = None) -> Objective:
        """The loss, with its corrections or with others."""
        return Objective(
            loss=self.loss,
            reduction=self.reduction,
            contributions=corrections or self.corrections,
            entropy_coef=self.entropy_coef,
            value_coef=self.value_coef,
            value_loss=self.value_loss,
        )
