"""A short run with a checkpoint after every step, which goes on from the newest one.

``killed_run.py FOLDER KIND [NODES [EPOCHS]]`` writes ``started`` and the process of each rank to ``process-R`` when it
begins to train, and weights and the state of its callbacks to ``result-R`` at its end. A rank takes its place from the
variables of torchrun or of SLURM.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW
from typing_extensions import override

from kit.ranks import TIMEOUT
from kit.support import EOS, tiny_module, tiny_prompts, weights_of
from lightning_rl import FakeEngine, FSDP2Strategy, PromptDataModule, RLCallback
from lightning_rl.callbacks import AdaptiveKL, Curriculum, DynamicSampling, EntropyBonus, TruncatedIS
from lightning_rl.checkpointing import latest_checkpoint
from lightning_rl.generation import Request

RANKS = {
    "plain": 1,
    "ahead": 1,
    "ahead filtered": 1,
    "two ahead filtered": 1,
    "ahead curriculum": 1,
    "ddp": 2,
    "fsdp2": 2,
}
"""Number of processes of each kind of run."""


def scripted(request: Request) -> list[int]:
    """Return some tokens that depend on the sample alone."""
    return [2 + request.sample_id % 7, *range(2, 2 + request.sample_id % 5), EOS]


def two_ahead() -> FakeEngine:
    """Engine that receives weights while it generates two rollouts ahead."""
    engine = FakeEngine(scripted)
    engine.capabilities = replace(engine.capabilities, syncs_while_generating=True, concurrent=True)
    return engine


class Started(RLCallback):
    """Tells that training has begun."""

    name = "started"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"process-{trainer.global_rank}").write_text(str(os.getpid()))
        (self.folder / "started").touch()


def main(folder: Path, kind: str, nodes: int = 1, epochs: int = 3) -> None:
    """Runs to the end of some epochs of 16 optimizer steps."""
    torch.set_num_threads(1)
    two = kind.startswith("two")
    module = tiny_module(
        optimizer=partial(AdamW, lr=1e-2),
        minibatches_per_rollout=2,
        epochs_per_rollout=2,
        max_staleness=2 if two else int("ahead" in kind),
        engine=two_ahead() if two else None,
    )
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    corrections: list[RLCallback] = [AdaptiveKL(0.1, as_loss=True), EntropyBonus(0.01, target=1.0), TruncatedIS()]
    if "filtered" in kind:
        corrections.append(DynamicSampling(max_rounds=3))
    data = tiny_prompts(16, 4, validation=[[2, 3], [4]])
    if "curriculum" in kind:
        corrections.append(Curriculum("source"))
        sources = {"one": [[2 + row, 3] for row in range(9)], "two": [[2 + row] for row in range(7)]}
        data = PromptDataModule(sources, 4, validation=[[2, 3], [4]], weights={"one": 3, "two": 1})
    strategy: Any = "auto"
    if kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    elif kind == "fsdp2":  # its checkpoints are folders
        strategy = FSDP2Strategy(process_group_backend="gloo", timeout=TIMEOUT)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[saving, *corrections, Started(folder)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=7, devices=RANKS[kind] // nodes,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, limit_val_batches=1, strategy=strategy, num_nodes=nodes,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=latest_checkpoint(folder))
    states = {callback.name: callback.state_dict() for callback in corrections}
    weights = {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in weights_of(module).items()}
    result = {"weights": weights, "states": states, "steps": trainer.global_step}
    torch.save(result, folder / f"result-{trainer.global_rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
