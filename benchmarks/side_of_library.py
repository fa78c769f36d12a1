"""The library's side of `against_trl.py`: GRPO through ``Trainer.fit`` with every metric and a CSV row for each step.

Makes a step for each input line, and writes its measurements as a line of JSON.
"""

import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from measure import peak_memory
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override
from workload import Phases, Workload, workload

from lightning_rl import (
    GRPO,
    ClippedSurrogate,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    SamplingParams,
    TransformersEngine,
)
from lightning_rl.callbacks import OPSM, NoEOSMask, RolloutKL, TruncatedIS
from lightning_rl.data import StepIndex
from lightning_rl.generation import Completion, Request
from lightning_rl.rollout import FinishReason


class TimedEngine(TransformersEngine):
    """Notes how long it takes to draw."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self.phases = phases

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        with self.phases.of("generation"):
            return super().generate_batch(requests, logprobs=logprobs)


class ScriptedLengths(TimedEngine):
    """Draws as many tokens for each row as it is told, and makes an EOS of the last one and of no other."""

    def __init__(self, work: Workload, phases: Phases) -> None:
        super().__init__(phases)
        self.eos = work.eos
        self.samplings = [SamplingParams(max_new_tokens=length, eos_token_ids=()) for length in work.lengths]

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        scripted = [
            replace(request, sampling=self.samplings[request.sample_id % len(self.samplings)]) for request in requests
        ]
        drawn = super().generate_batch(scripted, logprobs=logprobs)
        return [replace(each, token_ids=self._with_eos(each.token_ids), finish=FinishReason.STOP) for each in drawn]

    def _with_eos(self, ids: Sequence[int]) -> tuple[int, ...]:
        return (*(self.eos + 1 if token == self.eos else token for token in ids[:-1]), self.eos)


class TimedModule(RLLightningModule):
    """Notes how long its rollouts and its optimizer steps take."""

    phases: Phases

    @override
    def on_train_batch_start(self, batch: StepIndex, batch_idx: int) -> None:
        """Make a rollout."""
        with self.phases.of("rollout"):
            super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, batch: StepIndex, batch_idx: int) -> dict[str, Tensor]:
        """Make an optimizer step."""
        with self.phases.of("update"):
            return super().training_step(batch, batch_idx)


class Steps(RLCallback):
    """Holds the run until it is told to go on."""

    name = "steps"

    def __init__(self, phases: Phases) -> None:
        self.phases, self.drawn, self.trained, self.reward = phases, 0, 0, 0.0
        self.begin()

    def begin(self) -> None:
        """Wait for a line; without one the run is over."""
        if not sys.stdin.readline():
            raise SystemExit
        self.phases.take()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    @override
    def observe(self, rollout: Rollout) -> None:
        self.drawn, self.trained = int(rollout.sampled_lengths.sum()), int(rollout.valid_tokens.sum())
        self.reward = rollout.rewards.mean().item()

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        """Write what the step took."""
        whole = time.perf_counter() - self.wall, time.process_time() - self.cpu
        seconds = self.phases.take()
        rollout, generation = seconds.pop("rollout"), seconds["generation"]
        seconds["scoring"] = rollout[0] - generation[0], rollout[1] - generation[1]
        done = {"tokens": [self.drawn, self.trained], "reward": self.reward, "peak": peak_memory()}
        print(json.dumps({"whole": whole, **seconds, **done}), flush=True)
        self.begin()


def main(cell: dict[str, Any]) -> None:
    """Train for as long as there are lines."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    phases, work = Phases(), workload(**cell)
    module = TimedModule(
        lambda: work.model,
        work.rewards,
        advantages=GRPO(epsilon=1e-4),
        loss=ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        reduction="token_mean",
        engine=ScriptedLengths(work, phases) if work.lengths else TimedEngine(phases),
        tokenizer=work.tokenizer,
        group_size=cell["group"],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=cell["longest"]),
        optimizer=partial(AdamW, lr=cell["rate"], weight_decay=0.0, fused=True),
        max_grad_norm=1.0,
        seed=cell["seed"],
    )
    module.phases = phases
    four: list[RLCallback] = [NoEOSMask(), OPSM(), RolloutKL(), TruncatedIS()]
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[*(four if cell["corrections"] else []), Steps(phases)],
        logger=CSVLogger(folder),
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, PromptDataModule(work.rows, cell["prompts"], shuffle=False))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
