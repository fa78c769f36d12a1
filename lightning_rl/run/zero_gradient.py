"""Rollouts without a gradient, and the end of a run that has too many groups of them in a row."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import Corrections
from lightning_rl.data import StepIndex
from lightning_rl.distributed import RunEndError
from lightning_rl.run.run import run_of
from lightning_rl.utils.arguments import check_counts

MAX_RATE = 1e-2  # a higher one is named first
SHOWN = ("groups/sampled", "groups/filtered", "groups/solved", "groups/unsolved", "groups/zero_variance")
SHOWN += ("engine/aborted", "reward/failed", "length/truncated")

STOPPED = (
    "the learning rate was 0 in every parameter group at every optimizer step: raise lr of optimizer=, or let "
    "lr_scheduler= go on to the last step of the run, such as warmup_then_linear(warmup, max_steps)"
)


class IdleRunError(RunEndError):
    """Error that ends a run after too many groups in a row without a gradient or learning rate."""


class StopOnZeroGradient(Callback):
    """Ends a run after many groups in rollouts without an optimizer step that had both a gradient and a learning rate.

    A run without this callback gets it with its default. A rollout without a trained token makes no step. With all
    advantages zero, only momentum and weight decay move the policy. With a learning rate of 0 in every parameter group,
    nothing moves. One group with a learning rate is enough, such as the critic's during its warmup.

    Args:
        patience: Number of sampled groups in such rollouts in a row after which the run ends with a checkpoint, at
            least one rollout after a warning; None for never. If a sample is right with probability 0.01, 256 groups of
            8 samples are all wrong with probability 1e-9.

    Attributes:
        count: Number of sampled groups of such rollouts in a row.
        warned: True if a warning was given for them.
        over: True if the run ends before the next rollout.
        learning: True if the current rollout had a gradient at a learning rate above 0.
        stopped: True if it had a gradient at a learning rate of 0.
        figures: Metrics of the last rollout, over all ranks; empty before the first.
        reason: Cause of the last rollout without a gradient.
    """

    def __init__(self, patience: int | None = 256) -> None:
        check_counts(1, optional=True, patience=patience)
        self.patience = patience
        self._rates: list[float] = []
        self._reset()

    def _reset(self) -> None:
        self.count, self.reason, self._highest = 0, "", 0.0
        self.learning = self.stopped = self.warned = self.over = False
        self.figures: Mapping[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        self._rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if batch.step == 0:
            self.check()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        run = run_of(trainer)
        if run.skips(batch):
            return
        self.figures = run.log.rollout_figures or self.figures
        if outputs:
            self.note(outputs["optim/grad_norm"], self._rates)
        if batch.step == run.options.steps_per_rollout - 1:
            self.end_rollout(batch.rollout, run.corrections, run.log.constant_calls)

    def note(self, norm: Tensor, rates: Sequence[float]) -> None:
        """Record the gradient norm of an optimizer step and the learning rate of each parameter group.

        A non-finite norm counts as a gradient.
        """
        self._highest = max([self._highest, *rates])
        moves, has_gradient = any(rate != 0 for rate in rates), bool(norm != 0)
        self.learning = self.learning or (has_gradient and moves)
        self.stopped = self.stopped or (has_gradient and not moves)

    def end_rollout(self, number: int, corrections: Corrections, constant_calls: str = "") -> None:
        """Update the count after the last step of a rollout.

        Warns once of rollouts in a row: of the first without a trained token, or at half of ``patience``.

        Args:
            number: Number of the rollout.
            corrections: Corrections of the run.
            constant_calls: Calls of reward functions that all returned one constant, as text.
        """
        stopped, taught = self.stopped, self.learning
        self.stopped = self.learning = False
        self.count = 0 if taught else self.count + int(self.figures["groups/sampled"])
        if taught:
            self.warned = False
            return
        self.reason = (
            STOPPED if stopped else f"{_high_rate(self._highest)}{_cause(self.figures, corrections, constant_calls)}"
        )
        self.reason += f" ({_last(self.figures)})"
        patience = math.inf if self.patience is None else self.patience
        if self.warned:
            self.over = self.count >= patience
        elif self.count >= patience / 2 or not self.figures["trained tokens"]:
            self.warned = True
            end = (
                ""
                if self.patience is None
                else f"; the run ends after {patience} groups in a row like its {self.count}"
            )
            warnings.warn(f"rollout {number} taught the policy nothing: {self.reason}{end}", stacklevel=2)

    def check(self) -> None:
        """End the run on every rank before the next rollout if the limit is reached.

        A resumed run gets one more rollout before it ends.

        Raises:
            IdleRunError: With the reason and the metrics of the last rollout.
        """
        if self.over:
            lacked = "learning rate" if self.reason.startswith(STOPPED) else "gradient"
            raise IdleRunError(
                f"expected the policy to learn, but {self.count} groups in a row had no {lacked} (patience="
                f"{self.patience}): {self.reason}"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = {name: getattr(self, name) for name in ("count", "learning", "stopped", "warned")}
        return {**saved, "figures": dict(self.figures)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.learning, self.stopped = (state_dict[name] for name in ("count", "learning", "stopped"))
        self.warned, self.figures = state_dict.get("warned", False), state_dict["figures"]


def _high_rate(rate: float) -> str:
    """Return a cause before all others if the learning rate of the run was far above those that train a policy."""
    if rate <= MAX_RATE:
        return ""
    return (
        f"a learning rate of {rate:g} has likely destroyed the policy: lower lr of optimizer=, as to 1e-6, and start "
        "from the first weights. If not, "
    )


def _last(figures: Mapping[str, float]) -> str:
    counts = [name for name in figures if "/" not in name]  # of row_counts
    names = [*counts, *(name for name in SHOWN if name in figures)]
    return "last rollout: " + ", ".join(f"{name} {figures[name]:g}" for name in names)


def _cause(figures: Mapping[str, float], corrections: Corrections, constant_calls: str) -> str:
    """Return the cause of a zero gradient, and the change to make."""
    if not figures.get("rows"):
        return f"every group was filtered by {_names(corrections, 'keep_groups')}, {_equal(figures, constant_calls)}"
    if not figures["trained tokens"] and figures.get("engine/aborted", 0.0) >= figures["rows"]:
        return "the engine aborted every sample (FinishReason.ABORT): check its log and its context length"
    if not figures["trained tokens"] and figures.get("env/failed") == 1:
        return "every conversation failed: fix what the log names first"
    if not figures["trained tokens"]:
        return f"{_names(corrections, 'exclude')} left no token to train on: keep some rows.{_longer(figures)}"
    if not figures["rewarded rows"]:
        return "no row has a reward: check that the reward functions apply to this data and that no mask drops them all"
    if not figures["tokens with an advantage"]:
        return f"every advantage is zero, {_equal(figures, constant_calls)}"
    masks = _names(corrections, "sequence_mask", "token_mask", "token_weight")
    return f"the gradient is zero, because {masks} masked every token with an advantage: loosen them.{_longer(figures)}"


def _equal(figures: Mapping[str, float], constant_calls: str) -> str:
    """Return why the rewards of each group are equal, and a change that can help."""
    groups, solved, unsolved = (figures[f"groups/{name}"] for name in ("sampled", "solved", "unsolved"))
    cause = (
        f"because the rewards of each prompt's samples are all equal ({solved / groups:.0%} of the groups solved, "
        f"{unsolved / groups:.0%} unsolved)"
    )
    difficulty = "harder" if solved == groups else "easier" if unsolved == groups else "easier or harder"
    calls = f" Test the rewards on a right answer, since all calls gave one value: {constant_calls}."
    return (
        f"{cause}: take {difficulty} prompts, a reward with partial credit, a larger group_size or temperature."
        f"{_longer(figures)}{calls if constant_calls else ''}"
    )


def _longer(figures: Mapping[str, float]) -> str:
    long = figures.get("length/truncated", 0.0) > 0.5
    return " Raise max_new_tokens, since most responses were truncated." if long else ""


def _names(corrections: Corrections, *methods: str) -> str:
    callbacks: Sequence[object] = corrections.contributors(*methods)
    return " and ".join(type(callback).__name__ for callback in callbacks) or "the loss"
