"""Metrics where Lightning's callbacks look for them, and checks of the metrics that they monitor."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_rl.corrections import RLCallback
from lightning_rl.glossary import can_exist, examples
from lightning_rl.utils.trainer import callbacks_of, is_own

ON_THE_BAR = "reward/task"  # more would not fit beside the bar; `RolloutSummary` shows the rest
EVALUATED = ("val/", "test/")
OF_LIGHTNING = ("epoch", "step")  # names that ModelCheckpoint adds
AT_ANY_TIME = ("reward_metric/", "env/")  # of rewards and environments, which may log them in later rollouts alone
OF_A_PART = {
    "environment": re.compile(r"(val/([^/]+/)?)?env/.*|time/environment"),
    "critic": re.compile(r"value/.*|loss/value"),
    "max_staleness": re.compile(r"in_flight/.*"),
    "validation": re.compile(r"val/(reward|length)/.*"),
}
OF_OTHERS = re.compile(  # of some losses, estimators, callbacks, engines and data; known after the first step
    r"kl/(ref|penalty)|policy/(clipped|outside|weight|weight_max|chosen|kept)|time/(canary|wait)|prompts/dropped"
    r"|reward/greedy|signal_audit/.*|(curriculum|role_baseline)/.*|.*@\w+|.*/answer/failed"
)
RISING = re.compile(r"(.+/)?(reward/(task|shaped|greedy)|(pass|avg|maj)@\d+(_low|_high)?|accuracy)|env/reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNames:
    """Names of which the metrics of a fit consist.

    Args:
        placeholders: Names for each placeholder of the glossary, such as ``"<function>"``.
        lacking: Parts in :data:`OF_A_PART` that the fit lacks.
        shares: Metrics of evaluations such as ``val/<name>/pass@1``.
        unlogged: Metrics that no hook of the corrections logs.
        rising: Reward functions of positive weight.
    """

    placeholders: Mapping[str, Collection[str]]
    lacking: Collection[str] = ()
    shares: Collection[str] = ()
    unlogged: Collection[str] = ()
    rising: Collection[str] = ()

    def lacks(self, metric: str) -> bool:
        """Return True if the fit cannot log a metric."""
        absent = any(OF_A_PART[part].fullmatch(metric) for part in self.lacking)
        return absent or not can_exist(metric, self.placeholders)

    def examples(self) -> list[str]:
        """Return metrics that the fit logs."""
        names = [name for name in examples(self.placeholders) if not (self.lacks(name) or OF_OTHERS.fullmatch(name))]
        return [*(name for name in names if name not in self.unlogged), *self.shares]

    def rises(self, metric: str) -> bool:
        """Return True if a fit should raise a metric."""
        function = metric.rpartition("reward/")[2] if "reward/" in metric else None
        return RISING.fullmatch(metric) is not None or function in self.rising


def publish(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Put metrics into ``callback_metrics``, ``logged_metrics`` and the progress bar of a Trainer.

    ``LightningModule.log`` would cost half a millisecond per metric and call.
    """
    tensors = dict(zip(values, torch.tensor([*values.values()], dtype=torch.float64).unbind(), strict=True))
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    if ON_THE_BAR in values:
        trainer.progress_bar_metrics[ON_THE_BAR] = values[ON_THE_BAR]


def monitors(trainer: Trainer) -> list[tuple[str, ModelCheckpoint | EarlyStopping]]:
    """Return each callback that monitors a metric, after the name of the metric."""
    callbacks = [one for one in callbacks_of(trainer) if isinstance(one, ModelCheckpoint | EarlyStopping)]
    return [(callback.monitor, callback) for callback in callbacks if callback.monitor]


def logs_itself(trainer: Trainer, module: LightningModule) -> bool:
    """Return True if code of the user may log metrics through Lightning, under names that are not known before."""
    return not (is_own(module) and all(isinstance(one, RLCallback) or is_own(one) for one in callbacks_of(trainer)))


def check_monitors(trainer: Trainer, names: RunNames, *, known: bool, validates: bool) -> None:
    """Raise ValueError for a monitored metric that the fit cannot have, and warn of a mode that is wrong for it.

    Args:
        trainer: Trainer of the fit.
        names: Names of the fit.
        known: True if the glossary has every metric of the fit.
        validates: True if the fit evaluates anything.
    """
    for metric, callback in monitors(trainer):
        if metric.startswith(EVALUATED[0]) and not validates:
            raise ValueError(
                f"expected {type(callback).__name__} to monitor a metric of training, got {metric!r} in a fit that "
                "evaluates nothing: pass validation= to PromptDataModule, or evaluation= to RLLightningModule"
            )
        if known and metric not in OF_LIGHTNING and names.lacks(metric):
            raise _unknown(metric, callback, names.examples())
        if callback.mode == "min" and names.rises(metric):
            rank_zero_warn(
                f"{type(callback).__name__} monitors {metric!r}, which should rise, with Lightning's default "
                'mode="min", by which lower values are better: pass mode="max"'
            )
        if isinstance(callback, ModelCheckpoint) and not metric.startswith(EVALUATED):
            rank_zero_info(
                f"ModelCheckpoint(monitor={metric!r}) saves the weights after the update on a rollout; the weights "
                "before it earned the value. To save weights with their own value, monitor a metric of an evaluation"
            )


def warn_without_validation(trainer: Trainer) -> None:
    """Warn of monitors of an evaluation, or print a line of one, if a fit ends before its first validation.

    Called when the loaders of the fit exist.
    """
    per_epoch, every = trainer.num_training_batches, trainer.check_val_every_n_epoch
    interval = cast(float | None, trainer.val_check_batch)
    if not trainer.limit_val_batches or interval is None:  # an interval of time
        return
    first = min(interval, per_epoch) + (every - 1) * per_epoch if every is not None else interval
    ends = [per_epoch * epochs for epochs in (trainer.max_epochs,) if epochs not in (None, -1)]
    end = min([*ends, *(steps for steps in (trainer.max_steps,) if steps != -1)], default=first)
    if first <= end:
        return
    idle = [
        f"{type(one).__name__} monitors {metric!r}" for metric, one in monitors(trainer) if metric.startswith("val/")
    ]
    text = (
        f"expected a validation within the fit, which ends at step {end:g}, got the first one at step {first:g}: pass "
        f"val_check_interval={end:g}, check_val_every_n_epoch=None to Trainer, or train longer"
    )
    if idle:
        rank_zero_warn(f"{text}; {' and '.join(idle)}, which has no value")
    else:
        rank_zero_info(text)


def check_names(trainer: Trainer, logged: Collection[str], *, evaluated: bool) -> None:
    """Raise ValueError for a monitored metric that was not logged by the first step, or the first evaluation."""
    for metric, callback in monitors(trainer):
        known = metric in (*logged, *OF_LIGHTNING) or metric.startswith(AT_ANY_TIME)
        if metric.startswith(EVALUATED) is evaluated and not known:
            raise _unknown(metric, callback, logged)


def _unknown(metric: str, callback: Any, logged: Collection[str]) -> ValueError:
    near = get_close_matches(metric, logged, n=3, cutoff=0.4)
    cure = f"monitor {' or '.join(map(repr, near))}" if near else "docs/metrics.md lists the names"
    return ValueError(
        f"expected {type(callback).__name__} to monitor a metric of this run, got {metric!r}, which nothing logs: "
        f"{cure}"
    )


def check_rollout_end(trainer: Trainer, module: LightningModule, *, old: Collection[str]) -> None:
    """Let each EarlyStopping on a metric of training look at it after a rollout, since an epoch has many of them.

    At the end of an epoch Lightning calls it. ``old`` are metrics without a value in this rollout.
    """
    for metric, callback in monitors(trainer) if not trainer.is_last_batch else ():
        of_training = not metric.startswith(EVALUATED) and metric in trainer.callback_metrics
        if isinstance(callback, EarlyStopping) and of_training and metric not in old:
            callback.on_train_epoch_end(trainer, module)
