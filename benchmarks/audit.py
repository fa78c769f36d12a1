"""What the audit costs on the quickstart's model: off, every tenth, every rollout; interleaved, medians and ratios.

Measured is CPU time of one thread, which other processes on the machine hardly change.
"""

import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Trainer
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import GRPO, PromptDataModule, RLCallback, RLLightningModule, Sampling
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import NoEOSMask, ReferenceKL

ROUNDS, ROLLOUTS, PROMPTS = 3, 10, 32


def seconds(audit: RLCallback | None, folder: str) -> float:
    """CPU seconds of a fit of ten rollouts of 256 answers, and the corrections of a GRPO recipe."""
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
    data = PromptDataModule(task.sorting_prompts(ROLLOUTS * PROMPTS, seed=0, exclude=[]), PROMPTS)
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
