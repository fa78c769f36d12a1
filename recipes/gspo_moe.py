"""GSPO on a mixture of experts with router replay: one ratio per response, through the experts of the engine.

Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071; Ma et al. 2025 (rollout routing replay), arXiv:2510.11370. ``train``
and ``test`` are files with a question and an answer per row. From the root of the repository, on eight GPUs, or with
``--tiny`` on one core of a laptop, where the policy generates itself:

    python recipes/gspo_moe.py
    python recipes/gspo_moe.py --tiny
    python recipes/train.py fit --config recipes/yaml/gspo_moe.yaml
"""

from functools import partial
from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl import GRPO, GSPO, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams, VLLMEngine
from lightning_rl.callbacks import RouterReplay
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen3-30B-A3B-Instruct-2507",
    engine: Literal["transformers", "vllm"] = "vllm",
    train: str = "recipes/data/gsm8k/train.jsonl",
    test: str = "recipes/data/gsm8k/test.jsonl",
    rollouts: int = 500,
    prompts_per_rollout: int = 64,
    max_new_tokens: int = 2048,
    learning_rate: float = 1e-6,
    accelerator: str = "auto",
    devices: int = 8,
    strategy: str = "fsdp2",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Train on eight responses per question, with four optimizer steps per rollout."""
    minibatches = 4
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        engine=VLLMEngine(tensor_parallel_size=4) if engine == "vllm" else None,
        advantages=GRPO(),
        loss=GSPO(),
        reduction="sequence_mean",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=8,
        minibatches_per_rollout=minibatches,
        model=ModelOptions(max_tokens_per_microbatch=16_384, activation_checkpointing=True),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        seed=seed,
    )
    columns = {"prompt": "question"}
    data = PromptDataModule(train, prompts_per_rollout, validation=test, columns=columns, chat=True, seed=seed)
    trainer = Trainer(
        max_steps=rollouts * minibatches, accelerator=accelerator, devices=devices, strategy=strategy,
        precision=precision, logger=CSVLogger("runs", "gspo_moe"),
        callbacks=[
            RouterReplay(),
        ],
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main, model="mixture", engine="transformers")
