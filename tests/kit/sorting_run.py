"""The quickstart's task on two nodes and servers, which goes on from its newest checkpoint.

``sorting_run.py FOLDER ROLLOUTS [URL...]``, on the launcher's servers if there is no URL: each rank writes its process
to ``process-R`` when it begins to train, and a line to ``rollouts-R.jsonl`` for each rollout; rank 0 what the canary
sees after each sync to ``syncs.jsonl``, and accuracy on held-out lists to ``accuracy-before`` and ``accuracy-after``.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from typing_extensions import override

from kit.ranks import STRATEGIES
from lightning_rl import (
    GRPO,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    SamplingParams,
    VLLMServerEngine,
    launched_servers,
    warmup_then_linear,
)
from lightning_rl.callbacks import NoEOSMask, TruncatedIS
from lightning_rl.checkpointing import latest_checkpoint
from lightning_rl.generation.weights.canary import Canary, Measurement

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import sorting_task as task


class Diary(RLCallback):
    """Writes down what each rollout holds, and how far the engine's log-probabilities are from the trainer's."""

    name = "diary"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"process-{trainer.global_rank}").write_text(str(os.getpid()))

    @override
    def observe(self, rollout: Rollout) -> None:
        versions = rollout.policy_version[rollout.action_mask].unique().tolist()
        line = {"ids": rollout.sample_ids.tolist(), "versions": versions, "reward": float(rollout.rewards.mean())}
        append(self.folder / f"rollouts-{torch.distributed.get_rank()}.jsonl", line)


class OpenCanary(Canary):
    """Writes down the largest difference between any engine and the trainer after each sync."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @override
    def judge(self, measurement: Measurement, trainer: Any, **options: Any) -> tuple[float, float]:
        largest, mean = super().judge(measurement, trainer, **options)
        append(
            self.folder / "syncs.jsonl",
            {"version": measurement.version, "apart": largest, "engines": [*measurement.values]},
        )
        return largest, mean


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main(folder: Path, rollouts: int, urls: list[str]) -> None:
    """Runs to the end of some rollouts of 256 answers, each of one optimizer step."""
    torch.set_num_threads(1)
    held_out = task.held_out_prompts()
    engine = VLLMServerEngine(
        urls or launched_servers,
        transfer="broadcast",
        storage=folder / "weights",
        patience=600,
        timeout=600,
        canary=OpenCanary(folder),
    )
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, 0), tokenizer=task.sorting_tokenizer(), rewards=task.exactly_sorted,
        engine=engine, sampling=SamplingParams(max_new_tokens=12), advantages=GRPO(), group_size=8, max_staleness=1,
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0), lr_scheduler=warmup_then_linear(5, rollouts),
    )  # fmt: skip
    data = PromptDataModule(
        task.sorting_prompts(rollouts * 32, seed=0, exclude=held_out), 32, validation=held_out, seed=0
    )
    trainer = Trainer(
        accelerator="cpu", num_nodes=2, devices=1, strategy=STRATEGIES["fsdp2"](), max_epochs=1, logger=False,
        num_sanity_val_steps=0, val_check_interval=rollouts, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            NoEOSMask(), TruncatedIS(), Diary(folder),
            ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=1),
        ],
    )  # fmt: skip
    path = latest_checkpoint(folder / "checkpoints")
    if path is None:
        before = trainer.validate(module, data, verbose=False)
        write(folder / "accuracy-before", before[0])
    trainer.fit(module, data, ckpt_path=path)
    write(folder / "accuracy-after", trainer.validate(module, data, verbose=False)[0])


def write(path: Path, metrics: Mapping[str, float]) -> None:
    """On the first rank."""
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps({name: float(value) for name, value in metrics.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
