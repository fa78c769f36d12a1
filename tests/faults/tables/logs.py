"""Faults between measurement and logger."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import lightning_rl.algorithm
import lightning_rl.metrics
import lightning_rl.rollouts.estimate_signal
import lightning_rl.run.training
from faults.fault import PPO, SMALL, STEPS, Fault, hooks, user
from faults.patches import after, logging
from lightning_rl import Rollout, Stat
from lightning_rl.callbacks import DynamicSampling, OverlongPenalty, ReferenceKL
from lightning_rl.metrics import MetricLog
from lightning_rl.rollouts.collector import Collector
from lightning_rl.update import StepGradient


def in_row(name: str, change: Callable[[float], float]) -> Any:
    """Change a metric on its way from the log to the loggers."""

    def changed(row: dict[str, float], *_: Any) -> dict[str, float]:
        return {**row, name: change(row[name])} if name in row else row

    return after(MetricLog, "row", changed)


def a_row_late(row: dict[str, float], log: MetricLog, *_: Any) -> dict[str, float]:
    before = getattr(log, "before", row)
    log.before = row  # pyrefly: ignore[missing-attribute]
    return {**row, "reward/task": before.get("reward/task", 0.0)}


def smoothed(row: dict[str, float], log: MetricLog, *_: Any) -> dict[str, float]:
    mean = 0.9 * getattr(log, "mean", row.get("kl/rollout", 0.0)) + 0.1 * row.get("kl/rollout", 0.0)
    log.mean = mean  # pyrefly: ignore[missing-attribute]
    return {**row, "kl/rollout": mean}


def mean_of_means(parts: Tensor) -> Tensor:
    count, mean, squares, maximum = parts.unbind(-1)
    return torch.stack([count.sum(0), mean.mean(0), squares.sum(0), maximum.amax(0)], -1)


def last_part(self: StepGradient, loss: Any) -> None:
    self.stats.append(loss.stats)
    self.parts = {name: part.double() for name, part in loss.parts.items()}


def in_step(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """Change a metric of the optimizer step before it is logged."""

    def changed(stats: dict[str, Stat], *_: Any) -> dict[str, Stat]:
        return {**stats, name: Stat.single(change(stats[name].moments[1]))}

    return after(StepGradient, "metrics", changed)


def in_rollout(name: str, stat: Callable[[Rollout], Stat]) -> Any:
    """Log something else of a rollout under a name."""
    return after(lightning_rl.rollouts.estimate_signal, "reward_metrics", logging(name, stat))


def in_view(name: str, stat: Callable[[Any], Stat]) -> Any:
    """Log something else of a microbatch under a name."""
    return after(lightning_rl.algorithm, "policy_metrics", logging(name, stat))


def in_signal(name: str, stat: Callable[[Rollout], Stat]) -> Any:
    """Log something else of the finished signal under a name."""

    def changed(result: Any, *_: Any) -> Any:
        rollout, rewards, stats = result
        return rollout, rewards, {**stats, name: stat(rollout)}

    return after(lightning_rl.run.training, "estimate_signal", changed)


def kept_alone(result: Any, *_: Any) -> Any:
    kept = result.rollout.groups.unique().numel()
    return result._replace(stats={**result.stats, "groups/sampled": Stat.single(float(kept)).sum()})


def percent(trainer: Any, pl_module: Any, optimizer: Any) -> None:
    stats = pl_module.run.metrics.groups["rollout"]
    place = stats.keys.index("reward/task")
    stats.moments[place, 1] *= 100


def without(name: str, row: Mapping[str, float], *_: Any) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != name}


FAULTS: tuple[Fault, ...] = (
    Fault("rewards logged as percentages", "reward/task", patches=[in_row("reward/task", lambda x: 100 * x)]),
    Fault("a reward logged a row late", "reward/task", patches=[after(MetricLog, "row", a_row_late)]),
    Fault(
        "a KL that is smoothed before it is logged",
        "kl/rollout",
        options=STEPS,
        patches=[after(MetricLog, "row", smoothed)],
    ),
    Fault(
        "a figure that never reaches the logger",
        "kl/rollout",
        patches=[after(MetricLog, "row", partial(without, "kl/rollout"))],
    ),
    Fault(
        "figures that are means of means",
        "metric|policy/|kl/",
        options=SMALL,
        patches=[patch.object(lightning_rl.metrics, "merge_moments", mean_of_means)],
    ),
    Fault(
        "the loss of the last microbatch logged for that of the step",
        "loss/",
        options=SMALL,
        patches=[patch.object(StepGradient, "add", last_part)],
    ),
    Fault(
        "the square of the gradient norm logged",
        "optim/grad_norm",
        patches=[in_step("optim/grad_norm", lambda x: x**2)],
    ),
    user(
        "the shaped reward logged without its bonus",
        partial(OverlongPenalty, 8, 4),
        culprit="reward/shaped",
        patches=[in_rollout("reward/shaped", lambda rollout: Stat.of(rollout.rewards, rollout.trained))],
    ),
    user(
        "groups sampled counted after the filter",
        DynamicSampling,
        culprit="groups/sampled",
        patches=[after(Collector, "fill_groups", kept_alone)],
    ),
    Fault(
        "advantages logged over padding",
        "advantage/std",
        patches=[in_signal("advantage/std", lambda rollout: Stat.of(rollout.require("advantages")).std())],
    ),
    user(
        "a KL penalty logged with its sign lost",
        partial(ReferenceKL, 0.1),
        culprit="kl/penalty",
        options={**PPO, **STEPS},
        patches=[
            in_signal(
                "kl/penalty",
                lambda rollout: Stat.of(
                    0.1 * (rollout.require("old_logprobs") - rollout.require("ref_logprobs")).abs(),
                    rollout.valid_tokens,
                ),
            )
        ],
    ),
    Fault(
        "the largest ratio logged after the clip",
        "policy/ratio_max",
        options={"minibatches_per_rollout": 2, "epochs_per_rollout": 2},
        max_steps=12,
        patches=[
            in_view(
                "policy/ratio_max",
                lambda view: Stat.of(
                    (view.logprobs - view.require("old_logprobs")).detach().exp().clamp(0.8, 1.2), view.valid_tokens
                ).maximum(),
            )
        ],
    ),
    user("a hook that rescales what waits to be logged", hooks(on_before_optimizer_step=percent)),
)
