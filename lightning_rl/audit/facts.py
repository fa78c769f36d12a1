"""Facts: plain values of a run that checks compare with, and that a saved finding carries."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_rl.module import RLLightningModule

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
        minibatches: optimizer steps of a pass over a rollout.
        ranks: whose rows differ.
        max_new_tokens: bound of a response's length.
        max_turns: answers of a conversation; 0 without an environment.
        max_turn_tokens: bound of a turn's length.
        max_length: bound of prompt and conversation together.
        max_staleness: how many rollouts old a token's weights may be.
        max_grad_norm: what the gradient norm is clipped to; infinity for no clipping.
        eos_ids: ids that end a response.
        stop_strings: whether strings may end a response too.
        packing: whether microbatches are free of padding.
        engine: name of the engine's class.
        reward_weights: what each reward function is multiplied with, by name.
        seed: of the run; None if unknown.
        environments: names of what samples talk to; none for answers that nobody answers.
    """

    temperature: float = 1.0
    tolerance: float = TOLERANCE[torch.float32]
    group_size: int = 0
    groups: int = 0
    minibatches: int = 1
    ranks: int = 1
    max_new_tokens: int = 2**31
    max_turns: int = 0
    max_turn_tokens: int = 2**31
    max_length: int = 2**31
    max_staleness: int = 0
    max_grad_norm: float = float("inf")
    eos_ids: tuple[int, ...] = ()
    stop_strings: bool = False
    packing: bool = True
    engine: str = "none"
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    environments: tuple[str, ...] = ()

    @staticmethod
    def of(module: RLLightningModule) -> "RunFacts":
        """Those of a module that is being fitted."""
        sampling, limit = module.run.sampling, module.max_grad_norm
        limits = None if (talks := module.sampler.environments) is None else talks.limits
        mixed = str(module.trainer.precision) not in ("32-true", "64-true")
        return RunFacts(
            temperature=sampling.temperature,
            tolerance=COARSE if mixed else TOLERANCE.get(module.required_policy.model.dtype, COARSE),
            group_size=module.group_size,
            groups=module.prompt_stream.prompts_per_rollout // module.parallel.ranks,
            minibatches=module.minibatches_per_rollout,
            ranks=module.parallel.ranks,
            max_new_tokens=sampling.max_new_tokens,
            max_turns=0 if limits is None else limits.turns,
            max_turn_tokens=2**31 if limits is None else limits.turn_tokens or 2**31,
            max_length=2**31 if limits is None else limits.length or 2**31,
            max_staleness=module.max_staleness,
            max_grad_norm=float("inf") if limit is None else limit,
            eos_ids=tuple(sorted(sampling.eos_token_ids or ())),
            stop_strings=bool(sampling.stop),
            packing=module.packing,
            engine=type(module.engine).__name__,
            reward_weights=module.rewards.weights,
            seed=module.seed,
            environments=tuple(sorted(module.environments)),
        )
