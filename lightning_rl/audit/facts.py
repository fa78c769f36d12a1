"""Plain values of a run that checks use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch

from lightning_rl.audit.forwards import forwards_plainly
from lightning_rl.audit.live import LiveRun, overrides
from lightning_rl.data import PromptDataModule
from lightning_rl.environments import ConversationLimits
from lightning_rl.policy.logprobs import logprob_tolerance


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Options of a run.

    Attributes:
        temperature: Temperature of sampling and of all log-probabilities.
        tolerance: Mean difference in nats allowed between two computations of a log-probability.
        engine_tolerance: The same between engine and policy, which is smaller if both run one model.
        group_size: Number of samples per prompt.
        groups: Number of groups of a rollout on this rank; 0 if unknown.
        minibatches: Optimizer steps per pass over a rollout.
        ranks: Number of data-parallel ranks.
        max_new_tokens: Maximum length of a response.
        limits: Limits of conversations; None without an environment.
        max_staleness: Maximum age of a token's weights, in rollouts.
        max_grad_norm: Gradient norm to clip to; infinity for no clipping.
        engine: Name of the engine's class.
        reward_weights: Weights of the reward functions, by name.
        seed: Seed of the run; None if unknown.
        evaluations: Name, number of samples and values of k of each evaluation.
        plain_forward: True if the policy's forward is that of its model, and this rank holds all weights.
        data: Subclass of the data module that changes its prompts, and ``", or "``; empty if none does.
    """

    temperature: float = 1.0
    tolerance: float = logprob_tolerance(torch.float32)
    engine_tolerance: float = logprob_tolerance(torch.float32)
    group_size: int = 0
    groups: int = 0
    minibatches: int = 1
    ranks: int = 1
    max_new_tokens: int = 2**31
    limits: ConversationLimits | None = None
    max_staleness: int = 0
    max_grad_norm: float = float("inf")
    engine: str = "none"
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    evaluations: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    plain_forward: bool = True
    data: str = ""

    @staticmethod
    def of(live: LiveRun) -> "RunFacts":
        """Return the facts of a run."""
        data = live.data
        changed = any(overrides(data, name, PromptDataModule) for name in ("take", "at", "load_state_dict"))
        sampling, limit = live.sampling, live.options.max_grad_norm
        model, exact = live.policy.model, str(live.trainer.precision) in ("32-true", "64-true")
        shared = model if live.engine.capabilities.shares_policy else None
        return RunFacts(
            temperature=sampling.temperature,
            tolerance=logprob_tolerance(model.dtype, exact=exact),
            engine_tolerance=logprob_tolerance(model.dtype, exact=exact, model=shared),
            group_size=live.options.group_size,
            groups=data.prompts_per_rollout // live.parallel.ranks,
            minibatches=live.options.minibatches_per_rollout,
            ranks=live.parallel.ranks,
            max_new_tokens=sampling.max_new_tokens,
            limits=None if live.environments is None else live.environments.limits,
            max_staleness=live.options.max_staleness,
            max_grad_norm=float("inf") if limit is None else limit,
            engine=type(live.engine).__name__,
            reward_weights=live.rewards.weights,
            seed=live.options.seed,
            evaluations=tuple(
                (one.name, one.samples, cast(tuple[int, ...], one.pass_at)) for one in live.evaluator.evaluations
            ),
            plain_forward=forwards_plainly(live),
            data=f"data module {type(data).__name__}, or " if changed else "",
        )
