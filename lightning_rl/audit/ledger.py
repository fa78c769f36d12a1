"""Signal ledger: share of the sampled data that reaches the gradient, and the stages that remove the rest.

It is a waterfall from "sampled" to "used" in sequences, tokens and gradient weight. Stages are group filters, aborts,
exclusions, missing rewards and zero advantages, then masks, weights and the clipping of the loss in the updates. Each
sequence and token is charged once, to the first stage that removes it. Before the update all tokens weigh the same; in
it a token weighs the size of its advantage times its weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.live import LiveRun, live_run
from lightning_rl.corrections import Corrections, LossView, RLCallback, Stat, StepTrace
from lightning_rl.data import StepIndex
from lightning_rl.metrics import RunningStats
from lightning_rl.recording.accounting import (
    Charges,
    sampling_charges,
    sampling_stages,
    signal_charges,
    update_charges,
    update_stages,
)
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Rollout, concatenate
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.trainer import show_line

UNITS = ("sequences", "tokens", "weight")
SAMPLED, USED = "sampled", "used"
MIN_SHARE = 0.05  # percent


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a rollout over all ranks.

    Attributes:
        sequences: Number of sampled sequences.
        tokens: Number of sampled tokens.
        valid: Number of trained tokens.
        carrying: Number of valid tokens with an advantage.
        advantage: Sum of the absolute advantages.
    """

    sequences: float = 1.0
    tokens: float = 1.0
    valid: float = 1.0
    carrying: float = 1.0
    advantage: float = 1.0


class SignalLedger(RLCallback):
    """Logs the ledger of every rollout.

    Logs ``ledger/<unit>/<stage>``, the share of the sampled sequences, tokens or weight that a stage removed, and
    ``ledger/<unit>/used``, the remaining share; ``ledger/weight/used`` is the effective batch. With several passes over
    a rollout, shares of the update are means over the passes.

    Args:
        every_n_rollouts: Number of rollouts between tables on rank 0, shown after the rollout's last optimizer step.

    Raises:
        ValueError: If ``every_n_rollouts`` is below 1.
    """

    name = "ledger"

    def __init__(self, every_n_rollouts: int = 1) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts)
        self.every_n_rollouts = every_n_rollouts
        self.totals = Totals()
        self._live: LiveRun | None = None
        self._samples: list[tuple[Charges, Rollout]] = []
        self._stats: dict[str, Stat] = {}
        self._table: tuple[RunningStats, RunningStats] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._live = live_run(trainer, pl_module)
        self._samples, self._table = [], None

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        self._samples.append(sampling_charges(rollout, self._corrections))

    @override
    def observe(self, rollout: Rollout) -> None:
        samples, self._samples = self._samples, []
        charges = signal_charges(rollout, concatenate([part for _, part in samples]), self._corrections)
        taken = dict[str, Tensor]()
        for part in [*(part for part, _ in samples), charges]:
            for stage, amount in part.taken.items():
                total = amount.to(rollout.groups.device)
                taken[stage] = total + taken[stage] if stage in taken else total
        sampled = charges.remainder() + torch.stack(list(taken.values())).sum(0)
        advantages, logprobs = rollout.require("advantages"), rollout.rollout_logprobs
        if logprobs is not None:
            advantages = advantages.to(logprobs.dtype)  # as the update reads them
        size = torch.where(rollout.valid_tokens, advantages.double().abs(), 0.0).sum()
        amounts = [*sampled[:2], rollout.valid_tokens.sum().double(), charges.remainder()[1], size]
        self.totals = Totals(*self.collectives.sum(torch.stack(amounts)).tolist())
        self._stats = {
            f"ledger/{unit}/{SAMPLED}": Stat.single(sampled[place]).sum() for place, unit in enumerate(UNITS[:2])
        }
        self._stats |= {
            f"ledger/{unit}/{stage}": _share(taken[stage][place] / sampled[place].clamp(min=1), sampled[place])
            for stage in sampling_stages(self._corrections)
            for place, unit in enumerate(UNITS)
        }
        at_sampling, at_update = (RunningStats(self.collectives).to(rollout.groups.device) for _ in range(2))
        at_sampling.update(self._stats)
        self._table = at_sampling, at_update

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return self._stats

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        if self._live is None:  # a check before the first rollout
            return {}
        corrections, totals = self._corrections, self.totals
        charges, valid = update_charges(view, corrections, self._run.algorithm.loss), view.valid_tokens.sum().double()
        left = totals.carrying / max(totals.tokens, 1.0) / max(totals.advantage, 1e-300)
        scales = valid.new_tensor([1 / max(totals.sequences, 1.0), 1 / max(totals.tokens, 1.0), left])
        scales = scales * totals.valid / valid.clamp(min=1)  # so that the mean over valid tokens is the share
        amounts = {**charges.taken, USED: charges.remainder()}
        return {
            f"ledger/{unit}/{stage}": _share((amounts[stage] * scales)[place], valid)
            for stage in (*update_stages(corrections), USED)
            for place, unit in enumerate(UNITS)
        }

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return self._table is not None and rollout_number % self.every_n_rollouts == 0

    @override
    def observe_step(self, trace: StepTrace) -> None:
        if self._table is None:
            return
        stages = [*update_stages(self._corrections), USED]
        names = [f"{unit}/{stage}" for stage in stages for unit in UNITS]
        logged = [trace.logged.get(f"{self.name}/{name}", ()) for name in names]
        for moments in zip(*logged, strict=True):  # of each microbatch
            stats = {f"ledger/{name}": Stat(row) for name, row in zip(names, moments, strict=True)}
            self._table[1].update(stats)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        if self._table is None or batch.step < self._run.options.steps_per_rollout - 1:
            return
        if batch.rollout % self.every_n_rollouts == 0:
            figures = {name: value for stats in self._table if stats.keys for name, value in stats.figures().items()}
            stages = [*sampling_stages(self._corrections), *update_stages(self._corrections)]
            show_line(trainer, table(batch.rollout, stages, figures))
        self._table = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return asdict(self.totals)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.totals = Totals(**state_dict)

    @property
    def _run(self) -> LiveRun:
        if self._live is None:
            raise RuntimeError("expected SignalLedger to have a module, but no fit has begun: pass it to a Trainer")
        return self._live

    @property
    def _corrections(self) -> Corrections:
        return self._run.corrections


def table(number: int, stages: list[str], figures: dict[str, float]) -> str:
    """Return the ledger of a rollout as text, with a line for each stage that removed something."""
    width = max(len(stage) for stage in (*stages, f"rollout {number}"))
    counts = [f"{figures[f'ledger/{unit}/{SAMPLED}']:>11.0f}" for unit in UNITS[:2]]
    lines = [
        f"{f'rollout {number}':<{width}}" + "".join(f"{unit:>11}" for unit in UNITS),
        f"{SAMPLED:<{width}}" + "".join(counts) + f"{'100.0 %':>11}",
    ]
    for stage in (*stages, USED):
        shares = [100 * figures.get(f"ledger/{unit}/{stage}", 0.0) for unit in UNITS]
        if stage == USED:
            lines.append(f"{USED:<{width}}" + "".join(f"{share:>9.1f} %" for share in shares))
        elif any(abs(share) >= MIN_SHARE for share in shares):
            cells = [f"{-share:>+9.1f} %" if abs(share) >= MIN_SHARE else " " * 11 for share in shares]
            lines.append(f"{stage:<{width}}" + "".join(cells))
    return "\n".join(lines)


def _share(share: Tensor, population: Tensor) -> Stat:
    """Return a share whose mean over populations is exact; its deviation and maximum are meaningless."""
    return Stat(torch.stack([population, share, torch.zeros_like(share), share]).double())
