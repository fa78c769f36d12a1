"""One rank of a fit with the fake vLLM: ``fake_vllm_rank.py FOLDER`` saves the rank, GPU and dtype that vLLM took."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from kit.fake_vllm import fake_vllm
from kit.support import fit, tiny_module, tiny_prompts
from lightning_rl import VLLMEngine


def main(folder: Path) -> None:
    """Fit two rollouts on two ranks, which share a machine of two GPUs."""
    before = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    with fake_vllm(gpus=2) as fake:
        trainer = fit(
            tiny_module(engine=VLLMEngine()),
            data=tiny_prompts(8, 4),
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            precision="bf16-mixed",
        )
        built = [(engine.rank, engine.device_index, engine.dtype) for engine in fake.built]
    known = {"before": before, "built": built, "after": {name: os.environ.get(name) for name in before}}
    torch.save({**known, "ranks": dist.get_world_size()}, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
