"""Collect: the stages from prompts to a finished rollout, in their order."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from lightning_rl import distributed
from lightning_rl.advantages import Estimator
from lightning_rl.corrections import Contributions, Stat
from lightning_rl.data import Prompt
from lightning_rl.metrics import PhaseTimes
from lightning_rl.policy import PolicyModel, Scorer, make_plan
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.held import Held
from lightning_rl.rollouts.logprobs import scored
from lightning_rl.rollouts.sample import Drawer
from lightning_rl.rollouts.samples import Sampled
from lightning_rl.rollouts.signal import excluding, with_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Makes rollouts.

    Args:
        drawer: from prompts to scored samples.
        policy: scores them before the update.
        reference: scores them for ``ref_logprobs``, or None.
        estimator: from rewards to advantages.
        contributions: the corrections.
        old: whether log-probabilities of the policy before the update are needed.
        minibatches: optimizer steps per pass.
        token_budget: most tokens of a microbatch.
        packed: whether microbatches are free of padding.
        precise: context of every forward, for the precision of the run.
        times: takes the seconds of each phase.
        device: where the rollout ends up.
        max_staleness: how many rollouts old the weights may be that drew a token.
    """

    drawer: Drawer
    policy: PolicyModel
    reference: Scorer | None
    estimator: Estimator
    contributions: Contributions
    old: bool
    minibatches: int
    token_budget: int
    packed: bool
    precise: Callable[[], AbstractContextManager[object]]
    times: PhaseTimes
    device: torch.device
    max_staleness: int = 0

    def collect(
        self,
        take: Callable[[int], list[Prompt]],
        groups: int,
        *,
        cycle: int,
        rank: int,
        first: Sampled | Sequence[Prompt] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[Held, dict[str, Stat]]:
        """One rollout of ``groups`` groups on this rank, with its plan and statistics.

        Args:
            take: the next prompts.
            groups: how many.
            cycle: number of the rollout.
            rank: this one.
            first: the first round of the draw, if its prompts were taken or even sampled ahead.
            meanwhile: called once, as soon as nothing more is asked of the engine for this rollout.
        """
        free = isinstance(first, Sampled) and not self.contributions.offering("keep_groups")
        if free:
            meanwhile()
        with self.times.phase("draw", self.device):
            rollout, drawn = self.drawer.draw(take, groups, cycle=cycle, rank=rank, first=first)
        if not free:
            meanwhile()
        check_staleness(rollout, cycle, self.max_staleness)
        with self.times.phase("score", self.device), self.precise():
            rollout, excluded = excluding(rollout, self.contributions)
            plan = make_plan(
                rollout,
                minibatches=self.minibatches,
                token_budget=self.token_budget,
                packed=self.packed,
                max_over_ranks=partial(distributed.global_maximum, device=self.device),
            )
            rollout, plan = rollout.to(self.device), plan.to(self.device)
            rollout = scored(rollout, plan, self.policy, self.reference, self.contributions, old=self.old)
        with self.times.phase("signal", self.device):
            rollout, signal = with_signal(rollout, self.estimator, self.contributions, distributed.global_sum)
        held = Held.of(cycle, rollout, plan)
        self.contributions.observe(rollout)
        measured = self.contributions.rollout_metrics(rollout)
        return held, {**drawn, **excluded, **signal, **staleness(rollout, cycle), **measured}


def check_staleness(rollout: Rollout, cycle: int, most: int) -> None:
    """Refuses tokens of weights that are too old.

    Raises:
        RuntimeError: naming sample, version and bound.
    """
    late = rollout.action_mask & (cycle - rollout.policy_version > most)
    if late.any():
        row, position = late.nonzero()[0].tolist()
        raise RuntimeError(
            f"expected tokens of rollout {cycle} from weights at most {most} rollouts old (max_staleness), got version "
            f"{int(rollout.policy_version[row, position])} at row {row} (sample {int(rollout.sample_ids[row])}), "
            f"response position {position}"
        )


def staleness(rollout: Rollout, cycle: int) -> dict[str, Stat]:
    """How many rollouts ago the weights were synced that drew each token."""
    age = Stat.of(cycle - rollout.policy_version, rollout.valid_tokens)
    return {"staleness/mean": age, "staleness/max": age.maximum()}
