"""CISPO with vLLM servers, which generate one rollout ahead while the policy trains.

Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585; weights for stale tokens: see callbacks/truncated_is.py. ``train``
and ``test`` are files with a question and an answer per row. From the root of the repository, each command in a
separate shell; with ``--tiny`` the policy generates itself, also one rollout ahead:

    CUDA_VISIBLE_DEVICES=0 lightning-rl serve Qwen/Qwen2.5-1.5B-Instruct --port 8000
    CUDA_VISIBLE_DEVICES=1 python recipes/cispo_servers.py
    python recipes/cispo_servers.py --tiny
    python recipes/train.py fit --config recipes/yaml/cispo_servers.yaml
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import CISPO, GRPO, PromptDataModule, RLLightningModule, SamplingParams, VLLMServerEngine
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.policy import ModelOptions
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    servers: Sequence[str] = ("http://127.0.0.1:8000",),
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 32,
    max_new_tokens: int = 1024,
    learning_rate: float = 1e-6,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on eight responses per question, with two optimizer steps per rollout."""
    minibatches = 2
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        engine=VLLMServerEngine(servers) if servers else None,
        max_staleness=1,
        advantages=GRPO(),
        loss=CISPO(),
        reduction="token_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        minibatches_per_rollout=minibatches,
        model=ModelOptions(max_tokens_per_microbatch=8192),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts * minibatches, accelerator=accelerator, precision=precision,
        logger=CSVLogger("runs", "cispo_servers"),
        callbacks=[
            TruncatedIS(),
        ],
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main, servers=[])
