"""GRPO on GSM8K on two nodes of eight GPUs, with the policy sharded over all of them.

Source: Shao et al. 2024 (GRPO), arXiv:2402.03300. Run it on each node, under SLURM with ``srun python``, otherwise with
torchrun; every node needs access to ``train`` and ``test``. ``--tiny`` is two nodes of one process each, on one
machine:

    torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr HOST0 --master_port 29500 recipes/two_nodes.py
    torchrun --nnodes 2 --node_rank 0 --master_addr 127.0.0.1 --master_port 29500 recipes/two_nodes.py --tiny
    torchrun --nnodes 2 --node_rank 1 --master_addr 127.0.0.1 --master_port 29500 recipes/two_nodes.py --tiny

As a configuration: replace the script by ``recipes/train.py fit --config recipes/yaml/two_nodes.yaml``.
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import GRPO, ClippedSurrogate, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-7B-Instruct",
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 128,
    max_new_tokens: int = 1024,
    learning_rate: float = 1e-6,
    accelerator: str = "auto",
    devices: int = 8,
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on eight responses per question, with one optimizer step per rollout."""
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        advantages=GRPO(),
        loss=ClippedSurrogate(),
        reduction="sequence_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        model=ModelOptions(max_tokens_per_microbatch=16_384, activation_checkpointing=True),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        num_nodes=2, devices=devices, strategy="fsdp2", max_steps=rollouts, accelerator=accelerator,
        precision=precision, logger=CSVLogger("runs", "two_nodes"),
        callbacks=[
            ReferenceKL(beta=0.04, as_loss=True),
        ],
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main)
