"""LoRA on one GPU: GRPO on GSM8K that trains adapters; the model without them is the reference.

Source: Hu et al. 2021, arXiv:2106.09685; Shao et al. 2024 (GRPO), arXiv:2402.03300. Needs ``pip install
'lightning-rl[peft]'``. ``train`` and ``test`` are files with a question and an answer per row. From the root of the
repository:

    python recipes/lora.py
    python recipes/lora.py --tiny
    python recipes/train.py fit --config recipes/yaml/lora.yaml
"""

from functools import partial
from typing import Any, Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import GRPO, ClippedSurrogate, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy.build import ModelBuilder, build_model
from lightning_rl.rewards import NumberMatch


class LoRA(ModelBuilder):
    """Builder of a model with adapters of rank ``r`` at every linear layer."""

    def __init__(self, model: str, r: int = 16) -> None:
        self.model, self.r = model, r

    @override
    def __call__(self) -> PreTrainedModel:
        model = build_model(self.model)
        adapted: Any = get_peft_model(model, LoraConfig(r=self.r, target_modules="all-linear"))
        return adapted


def main(
    *,
    model: str = "Qwen/Qwen2.5-3B-Instruct",
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 32,
    max_new_tokens: int = 1024,
    learning_rate: float = 2e-5,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on eight responses per question, with one optimizer step per rollout."""
    module = RLLightningModule(
        policy=LoRA(model), tokenizer=model, rewards=NumberMatch(), advantages=GRPO(), loss=ClippedSurrogate(),
        reduction="sequence_mean", sampling=SamplingParams(max_new_tokens=max_new_tokens), group_size=8,
        model=ModelOptions(max_tokens_per_microbatch=8192, activation_checkpointing=True),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True), seed=seed,
    )  # fmt: skip
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts, accelerator=accelerator, devices=1, precision=precision, logger=CSVLogger("runs", "lora"),
        callbacks=[
            ReferenceKL(beta=0.01, as_loss=True),
        ],
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main)
