"""DAPO on GSM8K: clip-higher, token mean, dynamic sampling, a soft overlong penalty; no KL.

Source: Yu et al. 2025, arXiv:2503.14476. ``train`` and ``test`` are files with a question and an answer per row. From
the root of the repository:

    python recipes/dapo.py
    python recipes/dapo.py --tiny
    python recipes/train.py fit --config recipes/yaml/dapo.yaml
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import GRPO, ClippedSurrogate, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.callbacks import DynamicSampling, OverlongPenalty
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
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
    """Train on eight responses per question, with four optimizer steps per rollout."""
    minibatches = 4
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        advantages=GRPO(),
        loss=ClippedSurrogate(clip_low=0.2, clip_high=0.28),
        reduction="token_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        minibatches_per_rollout=minibatches,
        model=ModelOptions(max_tokens_per_microbatch=8192),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.1, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts * minibatches,
        accelerator=accelerator,
        precision=precision,
        logger=CSVLogger("runs", "dapo"),
        callbacks=[
            DynamicSampling(),
            OverlongPenalty(max_length=max_new_tokens, cache=max_new_tokens // 5),
        ],
    )
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main)
