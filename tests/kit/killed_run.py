"""A short run with a checkpoint after every step, which goes on from the newest one: ``killed_run.py FOLDER KIND``.

It writes ``started`` when training begins and, at its end, the weights and the state of its callbacks to ``result-R``.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from typing_extensions import override

from kit.support import tiny_module, tiny_prompts, weights_of
from lightning_rl import FSDP2Strategy, RLCallback
from lightning_rl.callbacks import AdaptiveKL, EntropyBonus, TruncatedIS
from lightning_rl.checkpointing import latest_checkpoint

RANKS = {"plain": 1, "ahead": 1, "fsdp2": 2}
"""How many processes each kind of run has."""


class Started(RLCallback):
    """Tells that training has begun."""

    name = "started"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / "started").touch()


def main(folder: Path, kind: str) -> None:
    """Runs to the end of 3 epochs of 16 optimizer steps."""
    torch.set_num_threads(1)
    module = tiny_module(optimizer=partial(AdamW, lr=1e-2), minibatches=2, epochs=2, max_staleness=int(kind == "ahead"))
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    corrections = [AdaptiveKL(0.1, as_loss=True), EntropyBonus(0.01, target=1.0), TruncatedIS()]
    strategy: Any = "auto"
    if kind == "fsdp2":  # its checkpoints are folders
        strategy = FSDP2Strategy(process_group_backend="gloo", timeout=timedelta(seconds=120))
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[saving, *corrections, Started(folder)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=7, devices=RANKS[kind],
        check_val_every_n_epoch=None, num_sanity_val_steps=0, limit_val_batches=1, strategy=strategy,
    )  # fmt: skip
    data = tiny_prompts(16, 4, validation=[[2, 3], [4]])
    trainer.fit(module, data, ckpt_path=latest_checkpoint(folder))
    states = {callback.name: callback.state_dict() for callback in corrections}
    weights = {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in weights_of(module).items()}
    result = {"weights": weights, "states": states, "steps": trainer.global_step}
    torch.save(result, folder / f"result-{os.environ.get('RANK', '0')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
