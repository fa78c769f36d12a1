"""A recipe of the smallest size that records its rollouts: two of them, four optimizer steps each."""

import argparse
from typing import Any

from kit.ranks import STRATEGIES
from kit.support import tiny_module, tiny_prompts
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_rl import LossView
from lightning_rl.callbacks import OPSM, NoEOSMask, ReferenceKL
from lightning_rl.recording import RolloutRecorder


def own_loss(view: LossView) -> Tensor:
    """A loss that lives in a script."""
    return -view.logprobs * view.require("advantages")


def main(folder: str, loss: str, delta: float, precision: Any, strategy: str, ranks: int) -> None:
    """Records to ``folder/recorded`` and keeps a checkpoint of every step beside it."""
    module = tiny_module(
        minibatches_per_rollout=2,
        epochs_per_rollout=2,
        max_tokens_per_microbatch=30,
        loss=own_loss if loss == "own" else loss,
    )
    where: dict[str, Any] = {"strategy": STRATEGIES[strategy]()} if strategy else {}
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=1,
        precision=precision,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[
            NoEOSMask(),
            OPSM(delta),
            ReferenceKL(0.1, as_loss=True),
            RolloutRecorder(f"{folder}/recorded"),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ],
        **where,
    )
    trainer.fit(module, tiny_prompts(8, 4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--loss", default="ppo")
    parser.add_argument("--delta", type=float, default=1e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--strategy", default="")
    parser.add_argument("--ranks", type=int, default=1)
    main(**vars(parser.parse_args()))
