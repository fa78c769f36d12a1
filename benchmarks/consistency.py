"""Cost of ``consistency="bitwise"``: CPU time of a rollout with its update, on the task of the quickstart.

    python benchmarks/consistency.py

Fits with and without it take turns. A rollout has 256 responses of at most 12 tokens. Fails if it costs more than 1.5
times the default, or if a log-probability of the update differs from the engine's.
"""

import logging
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from measure import Report
from torch.optim import AdamW
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import LossView, PromptDataModule, RLCallback, RLLightningModule, SamplingParams, Stat
from lightning_rl.policy import ModelOptions

WARM_UP, RATIO = 3, 1.5


class Costs(Callback):
    """CPU seconds of every batch, which is a rollout with its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.begun = time.process_time()

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.begun)


class Mismatch(RLCallback):
    """Largest difference of log-probabilities of engine and update, in nats."""

    name = "mismatch"

    def __init__(self) -> None:
        self.largest = 0.0

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        difference = (view.logprobs - view.require("rollout_logprobs"))[view.valid_tokens]
        self.largest = max(self.largest, float(difference.detach().abs().max()))
        return {}


def fit(seed: int, rollouts: int, updates: int, *, bitwise: bool) -> tuple[float, float]:
    """Return the median CPU seconds of a batch, and the largest mismatch."""
    costs, mismatch = Costs(), Mismatch()
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed),
        tokenizer=task.sorting_tokenizer(),
        rewards=task.exactly_sorted,
        sampling=SamplingParams(max_new_tokens=12),
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0, fused=True),
        minibatches_per_rollout=updates,
        model=ModelOptions(consistency="bitwise" if bitwise else None),
        seed=seed,
    )
    rows = task.sorting_prompts(rollouts * 32, seed=seed, exclude=task.held_out_prompts())
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[mismatch, costs], **options)
    trainer.fit(module, PromptDataModule(rows, 32, seed=seed))
    whole = [sum(costs.seconds[start : start + updates]) for start in range(0, len(costs.seconds), updates)]
    return median(whole[WARM_UP:]), mismatch.largest


def main(*, rollouts: int = 15, rounds: int = 3, updates: int = 1) -> None:
    """Fit with and without bitwise consistency in turn.

    Args:
        rollouts: Number of rollouts of a fit.
        rounds: Number of fits of each kind.
        updates: Number of optimizer steps per rollout.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report = Report("consistency", {"rollouts": rollouts, "rounds": rounds, "updates": updates})
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for seed in range(rounds):
        for bitwise in (False, True):
            found[bitwise].append(fit(seed, rollouts, updates, bitwise=bitwise))
    table = [
        ("bitwise" if bitwise else "default", f"{median(s for s, _ in each):.3f}", f"{max(d for _, d in each):.2g}")
        for bitwise, each in found.items()
    ]
    report.rows("median of the fits", ("consistency", "CPU seconds per rollout", "largest difference, nats"), table)
    ratios = [one / other for (one, _), (other, _) in zip(found[True], found[False], strict=True)]
    report.bound("CPU time, bitwise : default", median(ratios), at_most=RATIO)
    if updates == 1:
        report.bound("largest difference of engine and update", max(d for _, d in found[True]), at_most=0.0)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
