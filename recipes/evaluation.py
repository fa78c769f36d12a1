"""Evaluation only: accuracy of a model on GSM8K, greedily and with eight samples.

Source: the unbiased pass@k of Chen et al. 2021, arXiv:2107.03374. Samples are saved below ``runs/evaluation``;
docs/evaluation.md lists the metrics. ``test`` is a file with a question and an answer per row. From the root of the
repository:

    python recipes/evaluation.py
    python recipes/evaluation.py --tiny
    python recipes/train.py test --config recipes/yaml/evaluation.yaml
"""

from typing import Literal

import tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import Evaluation, RLLightningModule, SamplingParams, VLLMEngine
from lightning_rl.data import PromptDataset
from lightning_rl.rewards import NumberMatch


def main(
    *,
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    engine: Literal["transformers", "vllm"] = "transformers",
    test: str = "recipes/data/gsm8k/test.jsonl",
    samples: int = 8,
    max_new_tokens: int = 1024,
    accelerator: str = "auto",
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "bf16-mixed",
    seed: int = 0,
) -> Trainer:
    """Answer every question of the file; log pass@1 of greedy responses, and pass@k and avg@k of sampled ones."""
    questions = PromptDataset(test, columns={"prompt": "question"}, chat=True)
    module = RLLightningModule(
        policy=model,
        rewards=NumberMatch(),
        engine=VLLMEngine() if engine == "vllm" else None,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        evaluation=[
            Evaluation("greedy", questions),
            Evaluation("sampled", questions, samples=samples),
        ],
        seed=seed,
    )
    trainer = Trainer(accelerator=accelerator, precision=precision, logger=CSVLogger("runs", "evaluation"))
    trainer.test(module)
    return trainer


if __name__ == "__main__":
    tiny.command_line(main)
