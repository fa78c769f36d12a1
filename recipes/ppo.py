"""PPO with a critic on GSM8K: a value head on the policy, per-token advantages, and the KL penalty in the reward.

Source: Schulman et al. 2017, arXiv:1707.06347; for language models: Ziegler et al. 2019, arXiv:1909.08593. ``train``
and ``test`` are files with a question and an answer per row. From the root of the repository:

    python recipes/ppo.py
    python recipes/ppo.py --tiny
    python recipes/train.py fit --config recipes/yaml/ppo.yaml
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import (
    GAE,
    ClippedSurrogate,
    Critic,
    ModelOptions,
    PromptDataModule,
    RLLightningModule,
    SamplingParams,
    ValueLoss,
)
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 256,
    max_new_tokens: int = 512,
    learning_rate: float = 1e-6,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on one response per question, with four optimizer steps per rollout."""
    minibatches = 4
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        critic=Critic("shared", loss=ValueLoss(coef=0.1)),  # or the name of a model for a separate critic
        advantages=GAE(gamma=1.0, lam=0.95),
        loss=ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        reduction="token_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=1,
        minibatches_per_rollout=minibatches,
        model=ModelOptions(max_tokens_per_microbatch=8192),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts * minibatches,
        accelerator=accelerator,
        precision=precision,
        logger=CSVLogger("runs", "ppo"),
        callbacks=[
            ReferenceKL(beta=0.05),
            NoEOSMask(),
        ],
    )
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main, prompts_per_rollout=64)
