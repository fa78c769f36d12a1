"""Idle: rollouts that teach the policy nothing, and the end of a run that has too many of them in a row."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.distributed import RunEndError
from lightning_rl.rollout import Rollout

SHOWN = ("groups/sampled", "groups/filtered", "groups/zero_variance")
SHOWN += ("engine/aborted", "reward/failed", "length/truncated")

STOPPED = (
    "the learning rate was 0 in every parameter group at every optimizer step: raise lr of optimizer=, or let "
    "lr_scheduler= go on to the last step of the run, such as warmup_then_linear(warmup, max_steps)"
)


class IdleRunError(RunEndError):
    """A run has learned nothing for too long."""


@dataclass(slots=True)
class IdleRollouts:
    """Counts rollouts in a row without one optimizer step that had a gradient and a learning rate.

    A rollout without a token that trains makes no step at all; one whose advantages are all zero makes steps that move
    the policy by the optimizer's momentum and weight decay alone; with a rate of 0 in every parameter group nothing
    moves. None of them learns anything. One group with a rate is enough, such as the critic's before the policy begins.

    Attributes:
        count: of rollouts in a row.
        learning: whether the current rollout had a gradient at a rate above 0 so far.
        stopped: whether it had one at a rate of 0.
        figures: of the last rollout, over all ranks; empty before the first.
        reason: why the last idle rollout was one.
        ended: whether a rollout has ended since the fit began.
    """

    count: int = 0
    learning: bool = False
    stopped: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    ended: bool = False

    def note(self, norm: Tensor, rates: Sequence[float]) -> None:
        """Takes the gradient norm of an optimizer step, of which one that is not finite is no sign of idleness, and the
        learning rate of each parameter group.
        """
        moves, has_gradient = any(rate != 0 for rate in rates), bool(norm != 0)
        self.learning = self.learning or (has_gradient and moves)
        self.stopped = self.stopped or (has_gradient and not moves)

    def end_rollout(self, number: int, corrections: Corrections, max_count: int | None) -> None:
        """Counts a rollout after its last step.

        Warns of the first in a row if no token trained; of zero gradients, of which one alone is nothing unusual, once
        they are half of what the run puts up with.
        """
        self.ended = True
        stopped, self.stopped = self.stopped, False
        self.count, self.learning = 0 if self.learning else self.count + 1, False
        if not self.count:
            return
        self.reason = f"{STOPPED} ({_last(self.figures)})" if stopped else _reason(self.figures, corrections)
        half = 0 if max_count is None else max(max_count // 2, 1)
        if self.count == (half if self.figures.get("trained tokens") else 1):
            warnings.warn(f"rollout {number} taught the policy nothing: {self.reason}", stacklevel=2)

    def check(self, max_count: int | None) -> None:
        """Ends the run, on every rank alike, before the rollout that would be one more.

        A run that resumes has one rollout to show that it learns again.

        Raises:
            IdleRunError: with the reason and the figures of the last rollout.
        """
        if max_count is None or self.count < max_count:
            return
        count, self.count = self.count, max_count - 1
        if self.ended:
            lacked = "learning rate" if self.reason.startswith(STOPPED) else "gradient"
            raise IdleRunError(
                f"expected the policy to learn, but {count} rollouts in a row had no {lacked} (max_idle_rollouts="
                f"{max_count}): {self.reason}"
            )

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {"count": self.count, "learning": self.learning, "stopped": self.stopped, "figures": dict(self.figures)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "IdleRollouts":
        """The inverse of :meth:`state`."""
        return IdleRollouts(**state)


def census(rollout: Rollout) -> dict[str, Stat]:
    """How many rows and tokens of a finished rollout there are, and how many are left."""
    counts = {"rows": rollout.real, "rewarded rows": rollout.rewarded, "trained tokens": rollout.valid_tokens}
    counts |= {"excluded rows": rollout.real & ~rollout.trained}
    advantages = torch.zeros(()) if rollout.advantages is None else rollout.advantages
    counts |= {"tokens with an advantage": rollout.valid_tokens & (advantages != 0)}
    return {name: Stat.single(mask.sum()).sum() for name, mask in counts.items()}


def _reason(figures: Mapping[str, float], corrections: Corrections) -> str:
    """What took everything away, what to change, and the figures that show it."""
    return f"{_cause(figures, corrections)} ({_last(figures)})"


def _last(figures: Mapping[str, float]) -> str:
    names = [*census_names(figures), *(name for name in SHOWN if name in figures)]
    return "last rollout: " + ", ".join(f"{name} {figures[name]:g}" for name in names)


def census_names(figures: Mapping[str, float]) -> list[str]:
    """The figures that :func:`census` made."""
    return [name for name in figures if "/" not in name]


def _cause(figures: Mapping[str, float], corrections: Corrections) -> str:
    if not figures.get("rows"):
        return (
            f"every group was filtered by {_names(corrections, 'keep_groups')}, because the rewards of its samples are "
            "all equal: take easier or harder prompts, a reward with more values, a larger group_size or temperature"
        )
    if not figures["trained tokens"] and figures.get("engine/aborted", 0.0) >= figures["rows"]:
        return "the engine gave up every sample (Finish.ABORT): look at its own log, and whether prompts fit it"
    if not figures["trained tokens"]:
        truncated = " Raise max_new_tokens, since most responses were cut off." if _runs_long(figures) else ""
        return f"{_names(corrections, 'exclude')} left no token to train on: keep some rows.{truncated}"
    if not figures["rewarded rows"]:
        return "no row has a reward: see whether the reward functions apply to this data, and what masks them"
    if not figures["tokens with an advantage"]:
        return (
            "every advantage is zero, because the rewards of each prompt's samples are all equal: take easier or "
            "harder prompts, a reward with more values, a larger group_size or temperature"
        )
    masks = _names(corrections, "sequence_mask", "token_mask", "token_weight")
    truncated = " Raise max_new_tokens, since most responses were cut off." if _runs_long(figures) else ""
    return f"the gradient is zero, because {masks} took what had an advantage: loosen them.{truncated}"


def _runs_long(figures: Mapping[str, float]) -> bool:
    return figures.get("length/truncated", 0.0) > 0.5


def _names(corrections: Corrections, *methods: str) -> str:
    callbacks: Sequence[object] = corrections.contributors(*methods)
    return " and ".join(type(callback).__name__ for callback in callbacks) or "the loss"
