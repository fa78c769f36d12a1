"""Check of `gpu_smoke.py` against TRL: the same model, prompts, lengths and vLLM, each side in a process.

    python benchmarks/gpu_trl.py library
    python benchmarks/gpu_trl.py trl

Each side makes some GRPO steps and prints their seconds.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_findings import Findings, needs, needs_gpu
from gpu_models import random_model
from workload import prompt_texts, rewards_by_place, words

PROMPTS, GROUP, LONGEST, SHARE = 8, 32, 256, 0.3
WARM, STEPS = 1, 2  # of 70k tokens each
BUDGET = 4096  # tokens of a step of vLLM, TRL's value
RATE = 1e-6


def against_trl(findings: Findings) -> None:
    """TRL takes at least as long for a step."""
    needs("trl", "vllm")
    needs_gpu(findings)
    seconds = {}
    for side in ("library", "trl"):
        run = subprocess.run([sys.executable, __file__, side], stdout=subprocess.PIPE, text=True, check=True)
        last = [line for line in run.stdout.splitlines() if line.startswith('{"seconds"')][-1]
        seconds[side] = median(json.loads(last)["seconds"][-STEPS:])
        findings.figure(f"{side}, seconds a step, {PROMPTS} x {GROUP} answers of {LONGEST} tokens", seconds[side])
    findings.headline(", ".join(f"{side} {took:.1f} s a step" for side, took in seconds.items()))
    findings.at_least("TRL / library", seconds["trl"] / seconds["library"], 1.0)


def by_library() -> list[float]:
    """Our side."""
    from lightning.pytorch import Callback, Trainer
    from torch.optim import AdamW

    from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams, VLLMEngine

    class Clock(Callback):
        """Records the end times of steps."""

        def __init__(self) -> None:
            self.ends = list[float]()

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            """After each."""
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    clock = Clock()
    module = RLLightningModule(
        partial(random_model, "1.5B", "cpu", torch.bfloat16, longest=2048),
        rewards_by_place,
        engine=VLLMEngine(
            max_model_len=1024, gpu_memory_utilization=SHARE, max_num_batched_tokens=BUDGET, canary=False
        ),
        tokenizer=words(),
        group_size=GROUP,
        sampling=SamplingParams(max_new_tokens=LONGEST, eos_token_ids=()),
        optimizer=partial(AdamW, lr=RATE, weight_decay=0.0, fused=True),
    )
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=WARM + STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptDataModule(prompt_texts(PROMPTS * (WARM + STEPS)), PROMPTS))
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def by_trl() -> list[float]:
    """Make the steps with TRL."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Records the end times of steps."""

        def __init__(self) -> None:
            self.ends = list[float]()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """After each."""
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    clock, folder = Clock(), Path(tempfile.mkdtemp())
    random_model("1.5B", "cpu", torch.bfloat16, longest=2048).save_pretrained(folder / "model")
    words().save_pretrained(folder / "model")
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: rewards_by_place(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=PROMPTS * GROUP // 8,
            gradient_accumulation_steps=8,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            generation_kwargs={"ignore_eos": True},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=SHARE,
            vllm_enable_sleep_mode=True,
            learning_rate=RATE,
            max_steps=WARM + STEPS,
            bf16=True,
            model_init_kwargs={"dtype": "bfloat16"},
            gradient_checkpointing=False,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompt_texts(PROMPTS * (WARM + STEPS))]),
        processing_class=words(),
        callbacks=[clock],
    )
    trainer.train()
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def main(arguments: Sequence[str]) -> None:
    """Run one side."""
    warnings.simplefilter("ignore")
    seconds = by_library() if arguments[0] == "library" else by_trl()
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
