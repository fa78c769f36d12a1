"""Grade-school mathematics (GSM8K): GRPO with a number reward, and pass@k on the test split before and after.

    python recipes/gsm8k.py --policy Qwen/Qwen2.5-1.5B-Instruct --engine vllm --devices 4 --strategy fsdp2
    python recipes/gsm8k.py --tiny
    python recipes/train.py fit --config recipes/yaml/gsm8k.yaml

Source: Shao et al. 2024 (GRPO), arXiv:2402.03300. `--tiny` runs offline on a CPU in about a minute, with the model and
the bundled rows of `tiny_gsm8k.py`; otherwise rows are loaded from the hub.
"""

from functools import partial
from typing import Literal

import tiny_gsm8k as small
from command_line import call
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import AdamW

from lightning_rl import Evaluation, PromptDataModule, RLLightningModule, SamplingParams, VLLMEngine, warmup_then_linear
from lightning_rl.data import PromptDataset
from lightning_rl.policy import ModelOptions
from lightning_rl.reporting import SampleTable
from lightning_rl.rewards import NumberMatch, RegexMatch

BEST = "val/greedy/pass@1"
SHOWN = (BEST, "val/sampled/pass@4", "val/sampled/reward/task", "val/sampled/reward/correct", "val/sampled/reward/form")
SYSTEM = "Reason step by step, and write the answer alone behind #### at the end, such as #### 42."


def main(
    *, tiny: bool = False, policy: str = "Qwen/Qwen2.5-0.5B-Instruct",
    engine: Literal["transformers", "vllm"] = "transformers", rollouts: int = 500, prompts_per_rollout: int = 32,
    max_new_tokens: int = 512, learning_rate: float = 1e-6, seed: int = 0, accelerator: str = "auto",
    devices: int = 1, strategy: str = "auto",
) -> Trainer:  # fmt: skip
    """Train on eight responses per question; save the checkpoint with the best pass@1 and all evaluated samples."""
    questions = {"columns": {"prompt": "question"}, "chat": True}
    if tiny:
        model, tokenizer = partial(small.warm_started_policy, seed), small.tiny_tokenizer()
        train, test = (PromptDataset(small.FOLDER / f"{split}.jsonl", **questions) for split in ("train", "test"))
    else:
        model, tokenizer, hub = policy, None, {"name": "main", "system": SYSTEM, **questions}
        train, test = (PromptDataset("openai/gsm8k", split=split, **hub) for split in ("train", "test"))
    quarter = max(1, rollouts // 4)
    module = RLLightningModule(
        policy=model, tokenizer=tokenizer,
        rewards={"correct": NumberMatch(strict=True), "form": (RegexMatch(pattern=r"#### -?[0-9][0-9.,]*$"), 0.2)},
        evaluation=[Evaluation("greedy", test), Evaluation("sampled", test, samples=4)],
        engine=VLLMEngine() if engine == "vllm" else None, sampling=SamplingParams(max_new_tokens=max_new_tokens),
        advantages="grpo", group_size=8, model=ModelOptions(max_tokens_per_microbatch=16_384),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(rollouts // 10, rollouts), seed=seed,
    )  # fmt: skip
    best = ModelCheckpoint(monitor=BEST, mode="max", filename="{step}", save_last=True)
    trainer = Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, precision="32-true" if tiny else "bf16-mixed",
        max_steps=rollouts, val_check_interval=quarter, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        logger=CSVLogger("runs", "gsm8k"), callbacks=[best, LearningRateMonitor(), SampleTable(quarter)],
    )  # fmt: skip
    data = PromptDataModule(train, prompts_per_rollout, seed=seed)
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    after = trainer.callback_metrics
    figures = (f"{name} before={before[name]:.3f} after={after[name]:.3f}" for name in SHOWN)
    rank_zero_info("\n".join([*figures, f"metrics, samples and checkpoints: {trainer.log_dir}"]))
    return trainer


if __name__ == "__main__":
    sizes = {"rollouts": 24, "max_new_tokens": 12, "learning_rate": 1e-3}
    call(main, lambda: {"tiny": True, "accelerator": "cpu", **sizes})
