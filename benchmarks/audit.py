"""Cost of audit, ledger, recorder and corrections on the quickstart's model.

    python benchmarks/audit.py
    python benchmarks/audit.py --neighbours true

Runs of ten rollouts alternate. Corrections are compared with a run without, the others with the corrections of a GRPO
recipe. A low learning rate keeps the number of sampled tokens similar. Measures CPU time of one thread. It varies with
the cache use of other processes, so ``--neighbours`` compares audited rollouts with unaudited ones of the same run.
"""

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from measure import MIN_ROUNDS, Report, take_turns
from torch.optim import AdamW
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import GRPO, PromptDataModule, RLCallback, RLLightningModule, Rollout, SamplingParams
from lightning_rl.audit import SignalAudit, SignalLedger, schedule
from lightning_rl.audit.schedule import takes_turn
from lightning_rl.callbacks import OPSM, NoEOSMask, ReferenceKL, RolloutKL, TruncatedIS
from lightning_rl.data import StepIndex
from lightning_rl.recording import RolloutRecorder
from lightning_rl.testing.properties.check import Check

ROLLOUTS, PROMPTS, GROUP, RUNS, PAIRED = 10, 32, 8, 3, 34
Kind = Callable[[str], list[RLCallback]]


def recipe(folder: str) -> list[RLCallback]:
    """Return the corrections of a GRPO recipe."""
    del folder
    return [NoEOSMask(), ReferenceKL(0.01, as_loss=True)]


NONE, RECIPE = "no callback", "two corrections of a recipe"
KINDS: dict[str, Kind] = {
    NONE: lambda _: [],
    "four corrections": lambda _: [NoEOSMask(), OPSM(), RolloutKL(), TruncatedIS()],
    RECIPE: recipe,
    "the recipe's, audit as it comes": lambda folder: [*recipe(folder), SignalAudit()],
    "the recipe's, audit of every rollout": lambda folder: [*recipe(folder), SignalAudit(1, "raise")],
    "the recipe's, ledger": lambda folder: [*recipe(folder), SignalLedger()],
    "the recipe's, recorder": lambda folder: [*recipe(folder), RolloutRecorder(tempfile.mkdtemp(dir=folder))],
}
LIMITS = dict(zip(list(KINDS)[3:], (1.02, 1.25, 1.02, 1.05), strict=True))


class Drawn(RLCallback):
    """Counts what was drawn."""

    name = "drawn"

    def __init__(self) -> None:
        self.answers = self.tokens = 0

    @override
    def observe(self, rollout: Rollout) -> None:
        self.answers += len(rollout.sampled_lengths)
        self.tokens += int(rollout.sampled_lengths.sum())


def turn_of_every_rollout(check: Check, number: int, _every: int) -> bool:
    """Return True if a check runs at an audit of a run that audits every rollout."""
    return takes_turn(check, number, 1)


class TimedAudit(SignalAudit):
    """Looks at every second rollout with the turns of an audit of every one, and notes when each begins."""

    def __init__(self) -> None:
        super().__init__(2, "raise")
        self.begins: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: StepIndex, batch_idx: int) -> None:
        if batch.step == 0:
            self.begins.append(time.process_time())
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def pairs(folder: str) -> list[tuple[float, float]]:
    """CPU seconds of rollouts without the audit and of the next ones, with it; the audits 2 to 17 of a run."""
    audit, turn = TimedAudit(), turn_of_every_rollout
    with patch.object(schedule, "takes_turn", turn), patch("lightning_rl.audit.audit.takes_turn", turn):
        fit([*recipe(folder), audit], folder, PAIRED)
    spent = [end - begin for begin, end in zip(audit.begins, audit.begins[1:], strict=False)][1:]
    return list(zip(spent[::2], spent[1::2], strict=False))


def fit(callbacks: Sequence[RLCallback], folder: str, rollouts: int) -> Drawn:
    """Train for some rollouts of 256 answers."""
    module = RLLightningModule(
        policy=partial(task.untrained_policy, 0),
        tokenizer=task.sorting_tokenizer(),
        rewards=task.exactly_sorted,
        advantages=GRPO(),
        group_size=GROUP,
        sampling=SamplingParams(max_new_tokens=12),
        minibatches_per_rollout=2,
        optimizer=partial(AdamW, lr=1e-5),
    )
    data, drawn = PromptDataModule(task.sorting_prompts(rollouts * PROMPTS, seed=0, exclude=[]), PROMPTS), Drawn()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, drawn],
    )
    trainer.fit(module, data)
    return drawn


def main(*, rounds: int = MIN_ROUNDS, neighbours: bool = False, quick: bool = False) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if not quick:
        compare_neighbours()
    if not neighbours:
        compare_runs(rounds, 1 if quick else ROLLOUTS)


def compare_neighbours() -> None:
    """Print what an audited rollout takes more than the one before it."""
    with tempfile.TemporaryDirectory() as folder:
        both = [pair for _ in range(RUNS) for pair in pairs(folder)]
    bare, more = median(off for off, _ in both), [on - off for off, on in both]
    print(f"{len(both)} audited rollouts beside their neighbours: {1000 * bare:.0f} ms without")
    print(f"audit {1000 * median(more):.0f} ms more in the median ({100 * median(more) / bare:+.1f} %), ", end="")
    print(f"{1000 * mean(more):.0f} ms in the mean ({100 * mean(more) / bare:+.1f} %)")


def compare_runs(rounds: int, rollouts: int) -> None:
    """Print what runs take, and holds them to their bounds."""
    report, tokens = Report("audit"), {name: set[int]() for name in KINDS}

    def run(name: str, folder: str) -> int:
        drawn = fit(KINDS[name](folder), folder, rollouts)
        tokens[name].add(drawn.tokens)
        return drawn.answers

    with tempfile.TemporaryDirectory() as folder:
        runs = {name: partial(run, name, folder) for name in KINDS}
        seconds = take_turns(runs, rounds, tokens=rollouts * PROMPTS * GROUP)
    report.table(f"{rollouts} rollouts of {PROMPTS * GROUP} answers", seconds, base=RECIPE)
    drawn = [number for each in tokens.values() for number in each]
    report.bound("tokens drawn, most of fewest", max(drawn) / min(drawn), at_most=1.05)
    corrected = median(seconds["four corrections"].of_all(seconds[NONE]).cpu)
    report.bound("four corrections, of none", corrected, at_most=1.02)
    for name, at_most in LIMITS.items():
        report.bound(f"{name}: of without", median(seconds[name].of_all(seconds[RECIPE]).cpu), at_most=at_most)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
