"""Short fits of SmolLM2-135M-Instruct on the task of ``recipes/laptop.py``; ``make model`` writes the model."""

from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from addition_task import addition_prompts, last_number
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from kit.support import scratch
from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, SamplingParams
from lightning_rl.corrections.trace import StepTrace
from lightning_rl.reporting.run_files import read_folder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"
NEEDED = pytest.mark.skipif(not FOLDER.exists(), reason="SmolLM2-135M-Instruct is missing: make model")


class EngineDifferences(RLCallback):
    """Absolute differences of log-probabilities between engine and trainer, in the first step on each rollout."""

    name = "engine_differences"

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return step == 0

    @override
    def observe_step(self, trace: StepTrace) -> None:
        for view in (microbatch.view for microbatch in trace.microbatches):
            self.values.append((view.logprobs - view.require("rollout_logprobs")).abs()[view.valid_tokens].float())


def distinct_tokens(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Return the number of distinct tokens of each response, which differs where all answers are wrong."""
    return [len(set(ids)) / 24 for ids in completion_ids]


class ShortFit:
    """A fit of two rollouts of 16 responses, with its logged metrics by step.

    Attributes:
        module: The trained module.
        metrics: Logged values by metric and step.
        differences: Absolute differences of log-probabilities between engine and trainer, of every trained token.
    """

    def __init__(self, *callbacks: Callback, rollouts: int = 2, trainer: dict[str, Any] | None = None, **options: Any):
        training, _ = addition_prompts()
        chosen: dict[str, Any] = {
            "policy": str(FOLDER), "rewards": [last_number, distinct_tokens], "group_size": 4,
            "sampling": SamplingParams(max_new_tokens=24), "optimizer": partial(AdamW, lr=1e-5, fused=True),
        }  # fmt: skip
        self.module, differences = RLLightningModule(**{**chosen, **options}), EngineDifferences()
        self.folder = Path(mkdtemp(dir=scratch()))
        settings: dict[str, Any] = {"accelerator": "cpu", "enable_checkpointing": False, **(trainer or {})}
        self.trainer = Trainer(
            max_steps=rollouts, log_every_n_steps=1, num_sanity_val_steps=0, enable_progress_bar=False,
            enable_model_summary=False, logger=CSVLogger(self.folder, name="", version=""),
            callbacks=[differences, *callbacks], default_root_dir=self.folder, **settings,
        )  # fmt: skip
        self.trainer.fit(self.module, PromptDataModule(training, prompts_per_rollout=4))
        self.metrics = read_folder([self.folder]).metrics
        self.differences = torch.cat(differences.values)
