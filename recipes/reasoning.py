"""GRPO on a task of reasoning-gym: generated questions, scored by the task, with held-out ones for validation.

Source: Stojanovski et al. 2025, arXiv:2505.24760. Needs ``pip install 'lightning-rl[reasoning-gym]'``;
docs/environments.md describes its scorers. From the root of the repository:

    python recipes/reasoning.py
    python recipes/reasoning.py --task countdown
    python recipes/reasoning.py --tiny
    python recipes/train.py fit --config recipes/yaml/reasoning.yaml
"""

from functools import partial
from typing import Literal

import tiny
from adapters.reasoning_gym import ReasoningGym, ReasoningGymScore
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import GRPO, ClippedSurrogate, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.callbacks import NoEOSMask
from lightning_rl.data import PromptDataset


class Questions(PromptDataset):
    """Rows of a task as chat prompts."""

    def __init__(self, task: str, *, size: int, seed: int, system: str | None) -> None:
        super().__init__(ReasoningGym(task, size=size, seed=seed), chat=True, system=system)


def main(
    *,
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    task: str = "basic_arithmetic",
    tag: str | None = "answer",
    system: str | None = "Think first, then write the answer alone between <answer> and </answer>.",
    rows: int = 16_000,
    rollouts: int = 500,
    prompts_per_rollout: int = 32,
    max_new_tokens: int = 1024,
    learning_rate: float = 1e-6,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on eight responses per question, with one optimizer step per rollout."""
    questions = Questions(task, size=rows, seed=seed, system=system)
    held_out = Questions(task, size=256, seed=seed + 1, system=system)
    module = RLLightningModule(
        policy=model,
        rewards=ReasoningGymScore(ReasoningGym(task), tag=tag),
        advantages=GRPO(),
        loss=ClippedSurrogate(),
        reduction="token_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        model=ModelOptions(max_tokens_per_microbatch=8192),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    data = PromptDataModule(questions, prompts_per_rollout, validation=held_out, seed=seed)
    trainer = Trainer(
        max_steps=rollouts,
        accelerator=accelerator,
        precision=precision,
        logger=CSVLogger("runs", "reasoning"),
        callbacks=[
            NoEOSMask(),
        ],
    )
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main, tag="null", system="null", rows=64)
