"""End of a rollout in the log: a plain line where no terminal shows the bar, and warnings about rewards."""

import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.corrections import Corrections
from lightning_rl.rewards import Rewards
from lightning_rl.rewards.scoring import may_read
from lightning_rl.utils.trainer import callbacks_of, has_terminal

COLUMNS = {"reward": "reward/task", "kl": "kl/rollout", "length": "length/mean"}
REMEMBERED = 8  # rollouts
CHANCE = 0.01  # of a rollout without a reward, under the share of groups with one before

COLLAPSE = (
    "Likely causes: a learning rate that is too high or has no warmup, as with lr_scheduler=warmup_then_linear(10, "
    "steps); no limit in max_grad_norm; responses that no longer end (length/truncated) or have a new form: look at "
    "samples with SampleTable(), and resume from an earlier checkpoint"
)


class Groups(NamedTuple):
    """Groups of a rollout with a reward above 0, all its groups, and its mean reward."""

    rewarded: float
    sampled: float
    reward: float


class RolloutLog:
    """Lines and warnings at the ends of the rollouts of a fit."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = deque[Groups](maxlen=REMEMBERED)
        self._warned = set[str]()

    def end_rollout(
        self,
        trainer: Trainer,
        number: int,
        row: Mapping[str, float],
        figures: Mapping[str, float],
        corrections: Corrections,
        rewards: Rewards,
    ) -> None:
        """Print the line of a rollout unless something shows it, and warn of its rewards.

        Args:
            trainer: Trainer of the fit.
            number: Number of the rollout.
            row: Metrics after the last optimizer step of the rollout.
            figures: Metrics of the rollout over all ranks.
            corrections: Corrections of the run.
            rewards: Reward functions of the run.
        """
        now = time.monotonic()
        if not has_terminal() and not any(getattr(one, "prints_rollouts", False) for one in callbacks_of(trainer)):
            rank_zero_info(plain_line(trainer.global_step, row, now - self._began))
        self._began = now
        masking = [type(callback).__name__ for callback in corrections.contributors("reward_mask", "exclude")]
        reasons = {
            "masked": masked_reason(figures, masking),
            "fell": fall_reason(figures, self._before),
            "unread": unread_reason(figures, rewards),
        }
        groups, unsolved = figures.get("groups/sampled"), figures.get("groups/unsolved")
        if groups is not None and unsolved is not None:
            self._before.append(Groups(groups - unsolved, groups, figures.get("reward/task", 0.0)))
        for kind, reason in reasons.items():
            if reason and kind not in self._warned and trainer.is_global_zero:
                self._warned.add(kind)
                warnings.warn(f"rollout {number}: {reason}", stacklevel=2)


def plain_line(step: int, row: Mapping[str, float], seconds: float) -> str:
    """Return step, reward, KL, length and seconds of a rollout in one line."""
    shown = [f"{name} {row[metric]:.4g}" for name, metric in COLUMNS.items() if metric in row]
    return f"step {step}: {', '.join([*shown, f'{seconds:.1f} s'])}"


def masked_reason(figures: Mapping[str, float], masking: list[str]) -> str:
    """Return a warning if corrections left most rows of a rollout without a reward or excluded them, else ``""``."""
    rows = figures.get("rows", 0.0)
    kept = min(figures.get("rewarded rows", rows), rows - figures.get("excluded rows", 0.0))
    if not masking or kept >= rows / 2 or not figures.get("trained tokens"):  # StopOnZeroGradient warns of none
        return ""
    long = "raise max_new_tokens, or remove the mask until responses end. " if figures.get("length/truncated") else ""
    return (
        f"{' and '.join(masking)} masked the rewards of {1 - kept / rows:.0%} of the rows, and the policy learns from "
        f"the others alone: {long}A policy whose responses are nearly all masked learns nothing, not even to end them"
    )


def unread_reason(figures: Mapping[str, float], rewards: Rewards) -> str:
    """Return a warning if an environment gave rewards that no reward function reads, else ``""``."""
    given = any(name.startswith("env/") and name.endswith("/reward") for name in figures)
    if not given or any(may_read(function, "environment_reward") for function in rewards.by_name.values()):
        return ""
    return (
        "the environment gave rewards, and no reward function reads them: pass rewards=[EnvironmentReward(), ...] with "
        "the class of lightning_rl.environments, or give it the weight 0 to log them alone"
    )


def fall_reason(figures: Mapping[str, float], before: "deque[Groups]") -> str:
    """Return a warning if the reward is 0 in every group, unlike before, else ``""``."""
    groups = figures.get("groups/sampled", 0.0)
    if not before or not groups or figures.get("groups/unsolved", 0.0) < groups or figures.get("reward/task") != 0:
        return ""
    share = sum(one.rewarded for one in before) / (sum(one.sampled for one in before) + 1)
    if (1 - share) ** groups > CHANCE:
        return ""
    mean = sum(one.reward for one in before) / len(before)
    return f"the reward fell to 0, from {mean:.3g} on average before. {COLLAPSE}"
