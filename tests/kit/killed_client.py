"""A short run on servers with a checkpoint after every step: ``killed_client.py FOLDER STALENESS URL URL``.

It goes on from the newest checkpoint, writes ``started`` when training begins and its weights to ``result`` at the end.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW

from kit.killed_run import Started
from kit.scripted_server import KEY
from kit.support import tiny_module, tiny_prompts, weights_of
from lightning_rl import VLLMServerEngine
from lightning_rl.checkpointing import AtomicCheckpointIO, latest_checkpoint
from lightning_rl.generation.vllm import fleet


def main(folder: Path, staleness: int, urls: list[str]) -> None:
    """Runs to the end of 16 optimizer steps, 8 rollouts of two; no rollout is lost to a server that is slow to come."""
    torch.set_num_threads(1)
    fleet.POLL, fleet.BACKOFF = 0.05, 0.05
    engine = VLLMServerEngine(urls, api_key=KEY, canary=False, patience=60, storage=folder / "storage")
    module = tiny_module(
        optimizer=partial(AdamW, lr=1e-2),
        minibatches_per_rollout=2,
        max_staleness=staleness,
        engine=engine,
        reward_timeout=None,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1), Started(folder)],
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, tiny_prompts(8, 4), ckpt_path=latest_checkpoint(folder))
    torch.save({"weights": weights_of(module), "steps": trainer.global_step}, folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
