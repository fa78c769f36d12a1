"""Rollouts without a gradient, and the end of a run that has too many of them in a row."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import StepIndex
from lightning_rl.distributed import RunEndError
from lightning_rl.rollout import Rollout
from lightning_rl.utils.arguments import check_counts

SHOWN = ("groups/sampled", "groups/filtered", "groups/zero_variance")
SHOWN += ("engine/aborted", "reward/failed", "length/truncated")

STOPPED = (
    "the learning rate was 0 in every parameter group at every optimizer step: raise lr of optimizer=, or let "
    "lr_scheduler= go on to the last step of the run, such as warmup_then_linear(warmup, max_steps)"
)


class IdleRunError(RunEndError):
    """Error that ends a run after too many rollouts in a row without a gradient or learning rate."""


class StopOnZeroGradient(Callback):
    """Ends a run after consecutive rollouts without an optimizer step that had both a gradient and a learning rate.

    A run without this callback gets it with its default. A rollout without a trained token makes no step. With all
    advantages zero, only momentum and weight decay move the policy. With a learning rate of 0 in every parameter group,
    nothing moves. One group with a learning rate is enough, such as the critic's during its warmup.

    Args:
        patience: Number of such rollouts after which the run ends with a checkpoint; None to only warn.

    Attributes:
        count: Number of such rollouts in a row.
        learning: True if the current rollout had a gradient at a learning rate above 0.
        stopped: True if it had a gradient at a learning rate of 0.
        figures: Metrics of the last rollout, over all ranks; empty before the first.
        reason: Cause of the last rollout without a gradient.
        ended: True if a rollout has ended since the fit began.
    """

    def __init__(self, patience: int | None = 10) -> None:
        check_counts(1, optional=True, patience=patience)
        self.patience = patience
        self._rates: list[float] = []
        self._reset()

    def _reset(self) -> None:
        self.count, self.learning, self.stopped, self.reason, self.ended = 0, False, False, "", False
        self.figures: Mapping[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: StepIndex, batch_idx: int) -> None:
        self._rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if batch.step == 0:
            self.check()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        if pl_module.skips(batch):
            return
        self.figures = pl_module.run.rollout_figures or self.figures
        if outputs:
            self.note(outputs["optim/grad_norm"], self._rates)
        if batch.step == pl_module.steps_per_rollout - 1:
            self.end_rollout(batch.rollout, pl_module.run.corrections)

    def note(self, norm: Tensor, rates: Sequence[float]) -> None:
        """Record the gradient norm of an optimizer step and the learning rate of each parameter group.

        A non-finite norm counts as a gradient.
        """
        moves, has_gradient = any(rate != 0 for rate in rates), bool(norm != 0)
        self.learning = self.learning or (has_gradient and moves)
        self.stopped = self.stopped or (has_gradient and not moves)

    def end_rollout(self, number: int, corrections: Corrections) -> None:
        """Update the count after the last step of a rollout.

        Warns of the first rollout in a row without a trained token, and of zero gradients at half of ``patience``.
        """
        self.ended = True
        stopped, self.stopped = self.stopped, False
        self.count, self.learning = 0 if self.learning else self.count + 1, False
        if not self.count:
            return
        self.reason = f"{STOPPED} ({_last(self.figures)})" if stopped else _reason(self.figures, corrections)
        half = 0 if self.patience is None else max(self.patience // 2, 1)
        if self.count == (half if self.figures.get("trained tokens") else 1):
            warnings.warn(f"rollout {number} taught the policy nothing: {self.reason}", stacklevel=2)

    def check(self) -> None:
        """End the run on every rank before the next rollout if the limit is reached.

        A resumed run gets one more rollout before it ends.

        Raises:
            IdleRunError: With the reason and the metrics of the last rollout.
        """
        if self.patience is None or self.count < self.patience:
            return
        count, self.count = self.count, self.patience - 1
        if self.ended:
            lacked = "learning rate" if self.reason.startswith(STOPPED) else "gradient"
            raise IdleRunError(
                f"expected the policy to learn, but {count} rollouts in a row had no {lacked} (patience="
                f"{self.patience}): {self.reason}"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "learning": self.learning, "stopped": self.stopped, "figures": dict(self.figures)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.learning, self.stopped = (state_dict[name] for name in ("count", "learning", "stopped"))
        self.figures = state_dict["figures"]


def row_counts(rollout: Rollout) -> dict[str, Stat]:
    """Count the rows and tokens of a finished rollout, and those that are left to train on."""
    counts = {"rows": rollout.real, "rewarded rows": rollout.rewarded, "trained tokens": rollout.valid_tokens}
    counts |= {"excluded rows": rollout.real & ~rollout.trained}
    advantages = torch.zeros(()) if rollout.advantages is None else rollout.advantages
    counts |= {"tokens with an advantage": rollout.valid_tokens & (advantages != 0)}
    return {name: Stat.single(mask.sum()).sum() for name, mask in counts.items()}


def _reason(figures: Mapping[str, float], corrections: Corrections) -> str:
    """Return the cause of a zero gradient, the change to make, and the metrics that show it."""
    return f"{_cause(figures, corrections)} ({_last(figures)})"


def _last(figures: Mapping[str, float]) -> str:
    names = [*count_names(figures), *(name for name in SHOWN if name in figures)]
    return "last rollout: " + ", ".join(f"{name} {figures[name]:g}" for name in names)


def count_names(figures: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics that :func:`row_counts` made."""
    return [name for name in figures if "/" not in name]


def _cause(figures: Mapping[str, float], corrections: Corrections) -> str:
    if not figures.get("rows"):
        return (
            f"every group was filtered by {_names(corrections, 'keep_groups')}, because the rewards of its samples are "
            "all equal: take easier or harder prompts, a reward with more values, a larger group_size or temperature"
        )
    if not figures["trained tokens"] and figures.get("engine/aborted", 0.0) >= figures["rows"]:
        return "the engine aborted every sample (FinishReason.ABORT): check its log and its context length"
    if not figures["trained tokens"]:
        truncated = " Raise max_new_tokens, since most responses were truncated." if _runs_long(figures) else ""
        return f"{_names(corrections, 'exclude')} left no token to train on: keep some rows.{truncated}"
    if not figures["rewarded rows"]:
        return "no row has a reward: check that the reward functions apply to this data and that no mask drops them all"
    if not figures["tokens with an advantage"]:
        return (
            "every advantage is zero, because the rewards of each prompt's samples are all equal: take easier or "
            "harder prompts, a reward with more values, a larger group_size or temperature"
        )
    masks = _names(corrections, "sequence_mask", "token_mask", "token_weight")
    truncated = " Raise max_new_tokens, since most responses were truncated." if _runs_long(figures) else ""
    return f"the gradient is zero, because {masks} masked every token with an advantage: loosen them.{truncated}"


def _runs_long(figures: Mapping[str, float]) -> bool:
    return figures.get("length/truncated", 0.0) > 0.5


def _names(corrections: Corrections, *methods: str) -> str:
    callbacks: Sequence[object] = corrections.contributors(*methods)
    return " and ".join(type(callback).__name__ for callback in callbacks) or "the loss"
