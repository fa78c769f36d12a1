"""Shared code of the tests of known silent bugs: one optimizer step, a signal, samples from a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kit.support import SummedBy, an_algorithm, parity_reward, tiny_policy
from torch import Tensor

from lightning_rl import FakeEngine, Reinforce, RLCallback, Rollout, Stat, token_mean
from lightning_rl.advantages import resolve_advantages
from lightning_rl.corrections import Corrections
from lightning_rl.corrections.stat import merge_moments, reduce_moments
from lightning_rl.generation import SamplingParams
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.update import accumulate_gradient

G = 3


@dataclass
class Found:
    """Result of accumulating one optimizer step."""

    gradient: Tensor  # of every weight, as one vector
    losses: dict[str, float]
    stats: list[dict[str, Stat]]  # of each microbatch

    def metrics(self) -> dict[str, float]:
        """Every statistic, merged over the microbatches."""
        return {name: merged(*(stats[name] for stats in self.stats)) for name in self.stats[0]}


def merged(*stats: Stat) -> float:
    """The figure of one metric over several microbatches or ranks."""
    return reduce_moments(merge_moments(torch.stack([stat.moments for stat in stats])).tolist(), stats[0].reduction)


def one_step(
    rollout: Rollout,
    cut: Sequence[Sequence[int]],
    *callbacks: RLCallback,
    loss: Any = None,
    reduction: Any = token_mean,
    global_sum: GlobalSum = local_sum,
    **options: Any,
) -> Found:
    """Accumulates the gradient of a tiny float64 policy over microbatches of the given rows."""
    model = tiny_policy(dtype=torch.float64)
    policy = PolicyModel(model, None, temperature=0.7, packed=True)
    step = accumulate_gradient(
        rollout,
        plan_of_rows(rollout, [[list(rows) for rows in cut]]).step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm(callbacks, loss=loss or Reinforce(), reduction=reduction, **options),
        backward=lambda total: total.backward(),
        collectives=SummedBy(global_sum),
    )
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
    return Found(gradient, {name: float(part) for name, part in step.parts.items()}, step.stats)


def signal(
    rollout: Rollout, estimator: Any, *callbacks: RLCallback, global_sum: GlobalSum = local_sum
) -> tuple[Tensor, dict[str, float]]:
    """Advantages and what is logged beside them."""
    found, _, stats = estimate_signal(rollout, resolve_advantages(estimator), Corrections(callbacks), global_sum)
    return found.require("advantages"), {name: float(stat.value()) for name, stat in stats.items()}


def collector_of(*callbacks: RLCallback, script: Callable[..., Any] | None = None, **options: Any) -> Collector:
    """Makes :data:`G` samples of each prompt from a scripted engine that holds weights of version 6."""
    engine = options.pop("engine", None) or FakeEngine(script or (lambda request: [2] * (1 + request.sample_id % 3)))
    engine.load_weights([], 6)
    known: dict[str, Any] = {
        "engine": engine, "tokenizer": None, "rewards": Rewards([parity_reward]),
        "corrections": Corrections(callbacks), "group_size": G, "seed": 11,
        "sampling": SamplingParams(max_new_tokens=6, eos_token_ids=[1]),
    }  # fmt: skip
    return Collector(**{**known, **options})
