"""Grade-school mathematics (GSM8K) with a calculator: GRPO over conversations in which the policy may call a tool.

Calls have no reward or cost. docs/environments.md describes their parsing. `--tiny` runs offline on a CPU in about a
minute, with the model and the calculations of `tiny_tools.py`.

    python recipes/tools.py --model Qwen/Qwen2.5-1.5B-Instruct --engine vllm --devices 4 --strategy fsdp2
    python recipes/tools.py --tiny
    python recipes/train.py fit --config recipes/yaml/tools.yaml
"""

import operator
from functools import partial
from typing import Literal

import tiny_tools as small
from command_line import call
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import AdamW

from lightning_rl import Evaluation, PromptDataModule, RLLightningModule, SamplingParams, VLLMEngine, warmup_then_linear
from lightning_rl.data import PromptDataset
from lightning_rl.policy import ModelOptions
from lightning_rl.reporting import SampleTable
from lightning_rl.rewards import NumberMatch

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SYSTEM = "Reason step by step, calculate with the tool, and write the answer alone behind #### at the end."
SHOWN = "val/greedy/pass@1"


def calculate(a: float, operation: str, b: float) -> str:
    """Calculates with two numbers.

    Args:
        a: the first number
        operation: what to do with them (choices: ["+", "-", "*", "/"])
        b: the second number
    """
    return f"{OPERATIONS[operation](a, b):.10g}"


def main(
    *, tiny: bool = False, model: str = "Qwen/Qwen2.5-0.5B-Instruct",
    engine: Literal["transformers", "vllm"] = "transformers", rollouts: int = 500, prompts_per_rollout: int = 32,
    max_new_tokens: int = 1024, learning_rate: float = 1e-6, accelerator: str = "auto", devices: int = 1,
    strategy: str = "auto", seed: int = 0,
) -> Trainer:  # fmt: skip
    """Train on eight conversations per question; print greedy accuracy on the test split before and after."""
    questions = {"columns": {"prompt": "question"}, "chat": True}
    if tiny:
        policy, tokenizer = partial(small.warm_started_policy, seed), small.tiny_tokenizer()
        train, test = (PromptDataset(small.calculations(split), **questions) for split in ("train", "test"))
    else:
        policy, tokenizer, hub = model, None, {"name": "main", "system": SYSTEM, **questions}
        train, test = (PromptDataset("openai/gsm8k", split=split, **hub) for split in ("train", "test"))
    module = RLLightningModule(
        policy=policy, tokenizer=tokenizer, rewards=NumberMatch(strict=True), environment=[calculate], group_size=8,
        evaluation=Evaluation("greedy", test), engine=VLLMEngine() if engine == "vllm" else None,
        sampling=SamplingParams(max_new_tokens=max_new_tokens), model=ModelOptions(max_tokens_per_microbatch=16_384),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(rollouts // 10, rollouts), seed=seed,
    )  # fmt: skip
    trainer = Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, precision="32-true" if tiny else "bf16-mixed",
        max_steps=rollouts, val_check_interval=max(1, rollouts // 4), check_val_every_n_epoch=None,
        num_sanity_val_steps=0, logger=CSVLogger("runs", "tools"), callbacks=[SampleTable(max(1, rollouts // 4))],
    )  # fmt: skip
    data = PromptDataModule(train, prompts_per_rollout, seed=seed)
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    after = trainer.callback_metrics
    rank_zero_info(f"{trainer.log_dir}\n{SHOWN} before={before[SHOWN]:.3f} after={after[SHOWN]:.3f}")
    return trainer


if __name__ == "__main__":
    sizes = {"rollouts": 16, "max_new_tokens": 48, "learning_rate": 1e-3}
    call(main, lambda: {"tiny": True, "accelerator": "cpu", **sizes})
