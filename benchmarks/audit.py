"""What the audit costs on the quickstart's model: off, every tenth, every rollout; interleaved, medians and ratios.

Measured is CPU time of one thread. Other processes on the machine change it by their use of caches, from minute to
minute: so the rollouts of a run that audits every second one are compared with their neighbours as well, and
``python benchmarks/audit.py --pairs`` compares those alone.
"""

import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import AdamW
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import GRPO, PromptDataModule, RLCallback, RLLightningModule, Sampling
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.data import Ticket

ROUNDS, ROLLOUTS, PROMPTS = 5, 10, 32
RUNS, PAIRED = 3, 34


class TimedAudit(SignalAudit):
    """Looks at every second rollout, and notes when each begins."""

    def __init__(self) -> None:
        super().__init__(2, "raise")
        self.begins: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Ticket, batch_idx: int) -> None:
        if batch.step == 0:
            self.begins.append(time.process_time())
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def pairs(folder: str) -> list[tuple[float, float]]:
    """CPU seconds of rollouts without the audit and of the next ones, with it; the audits 2 to 17 of a run."""
    audit = TimedAudit()
    seconds(audit, folder, PAIRED)
    spent = [end - begin for begin, end in zip(audit.begins, audit.begins[1:], strict=False)][1:]
    return list(zip(spent[::2], spent[1::2], strict=False))


def seconds(audit: RLCallback | None, folder: str, rollouts: int = ROLLOUTS) -> float:
    """CPU seconds of a fit of some rollouts of 256 answers, and the corrections of a GRPO recipe."""
    module = RLLightningModule(
        policy=partial(task.untrained_policy, 0),
        tokenizer=task.sorting_tokenizer(),
        rewards=task.exactly_sorted,
        advantages=GRPO(),
        group_size=8,
        sampling=Sampling(max_new_tokens=12),
        minibatches=2,
        optimizer=partial(AdamW, lr=1e-5),
    )
    data = PromptDataModule(task.sorting_prompts(rollouts * PROMPTS, seed=0, exclude=[]), PROMPTS)
    callbacks: list[RLCallback] = [NoEOSMask(), ReferenceKL(0.01, as_loss=True)]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, *([audit] if audit else [])],
    )
    begin = time.process_time()
    trainer.fit(module, data)
    return time.process_time() - begin


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if "--pairs" not in sys.argv:
        compare_runs()
    compare_neighbours()


def compare_neighbours() -> None:
    """Prints what an audited rollout takes more than the one before it."""
    with tempfile.TemporaryDirectory() as folder:
        both = [pair for _ in range(RUNS) for pair in pairs(folder)]
    bare, more = median(off for off, _ in both), [on - off for off, on in both]
    print(f"{len(both)} audited rollouts beside their neighbours: {1000 * bare:.0f} ms without")
    print(f"audit {1000 * median(more):.0f} ms more in the median ({100 * median(more) / bare:+.1f} %), ", end="")
    print(f"{1000 * mean(more):.0f} ms in the mean ({100 * mean(more) / bare:+.1f} %)")


def compare_runs() -> None:
    """Prints what runs take, and what they take more than those without the audit."""
    kinds = {
        "off": lambda: None,
        "every 10": lambda: SignalAudit(10, "raise"),
        "every 1": lambda: SignalAudit(1, "raise"),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, make in kinds.items():
                times[name].append(seconds(make(), folder))
    bare = median(times["off"])
    print(f"{ROLLOUTS} rollouts of {PROMPTS * 8} answers, one thread, medians of {ROUNDS} interleaved runs")
    for name, values in times.items():
        print(f"audit {name:<9} {median(values):6.2f} s   {100 * (median(values) / bare - 1):+5.1f} %")
    extra = (median(times["every 1"]) - bare) / ROLLOUTS
    print(f"one audited rollout: {1000 * extra:.0f} ms more than the {1000 * bare / ROLLOUTS:.0f} ms without")


if __name__ == "__main__":
    main()
