"""On-policy distillation on GSM8K: the KL to a teacher of the same vocabulary on the student's responses.

Source: Agarwal et al. 2024, arXiv:2306.13649. ``beta`` weighs the KL against the reward for correct answers. ``train``
and ``test`` are files with a question and an answer per row. From the root of the repository:

    python recipes/distillation.py
    python recipes/distillation.py --tiny
    python recipes/train.py fit --config recipes/yaml/distillation.yaml
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import GRPO, ModelOptions, PromptDataModule, Reinforce, RLLightningModule, SamplingParams
from lightning_rl.callbacks import TeacherKL
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-0.5B-Instruct",
    teacher: str = "Qwen/Qwen2.5-7B-Instruct",
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 64,
    max_new_tokens: int = 512,
    learning_rate: float = 1e-5,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on four responses per question, with one optimizer step per rollout."""
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        advantages=GRPO(),
        loss=Reinforce(),
        reduction="token_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=4,
        model=ModelOptions(max_tokens_per_microbatch=16_384),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts,
        accelerator=accelerator,
        precision=precision,
        logger=CSVLogger("runs", "distillation"),
        callbacks=[
            TeacherKL(teacher, beta=1.0, as_loss=True, estimator="k2"),
        ],
    )
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main, model="novice", teacher="policy", rollouts=16, learning_rate=3e-3)
