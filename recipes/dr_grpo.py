"""Dr.GRPO on GSM8K: rewards without standard deviation, and sums over tokens divided by a constant.

Source: Liu et al. 2025, arXiv:2503.20783. ``train`` and ``test`` are files with a question and an answer per row. From
the root of the repository:

    python recipes/dr_grpo.py
    python recipes/dr_grpo.py --tiny
    python recipes/train.py fit --config recipes/yaml/dr_grpo.yaml
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import ClippedSurrogate, DrGRPO, PromptDataModule, RLLightningModule, SamplingParams, SequenceSumNorm
from lightning_rl.policy import ModelOptions
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
    """Train on eight responses per question, with one optimizer step per rollout."""
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        advantages=DrGRPO(),
        loss=ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        reduction=SequenceSumNorm(max_new_tokens),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        model=ModelOptions(max_tokens_per_microbatch=8192),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts,
        accelerator=accelerator,
        precision=precision,
        logger=CSVLogger("runs", "dr_grpo"),
        callbacks=[],
    )
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main)
