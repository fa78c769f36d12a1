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
from transformers import Qwen2ForCausalLM
from typing_extensions import override
from workload import EOS, SIZES, Phases, lengths_of, prompt_texts, qwen2, rewards_by_place, words

from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, Rollout, SamplingParams, TransformersEngine
from lightning_rl.callbacks import OPSM, NoEOSMask, RolloutKL, TruncatedIS
from lightning_rl.data import StepIndex
from lightning_rl.generation import Completion, Request
from lightning_rl.rollout import FinishReason


class ScriptedLengths(TransformersEngine):
    """Draws as many tokens for each row as it is told, and makes an EOS of the last one and of no other."""

    def __init__(self, lengths: Sequence[int], phases: Phases) -> None:
        super().__init__()
        self.phases = phases
        self.samplings = [SamplingParams(max_new_tokens=length, eos_token_ids=()) for length in lengths]

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        scripted = [
            replace(request, sampling=self.samplings[request.sample_id % len(self.samplings)]) for request in requests
        ]
        with self.phases.of("generation"):
            drawn = super()._draw(scripted, logprobs=logprobs)
        return [replace(each, token_ids=_with_eos(each.token_ids), finish=FinishReason.STOP) for each in drawn]


def _with_eos(ids: Sequence[int]) -> tuple[int, ...]:
    return (*(EOS + 1 if token == EOS else token for token in ids[:-1]), EOS)


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
        self.phases, self.drawn, self.trained = phases, 0, 0
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

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        """Write what the step took."""
        whole = time.perf_counter() - self.wall, time.process_time() - self.cpu
        seconds = self.phases.take()
        rollout, generation = seconds.pop("rollout"), seconds["generation"]
        seconds["scoring"] = rollout[0] - generation[0], rollout[1] - generation[1]
        step = {"whole": whole, **seconds, "tokens": [self.drawn, self.trained], "peak": peak_memory()}
        print(json.dumps(step), flush=True)
        self.begin()


def main(cell: dict[str, Any]) -> None:
    """Train for as long as there are lines."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    prompts, group, longest = cell["prompts"], cell["group"], cell["longest"]
    torch.manual_seed(0)
    model, phases = Qwen2ForCausalLM(qwen2(SIZES[cell["size"]])), Phases()
    module = TimedModule(
        lambda: model,
        rewards_by_place,
        engine=ScriptedLengths(lengths_of(cell["lengths"], prompts * group, longest), phases),
        tokenizer=words(),
        group_size=group,
        sampling=SamplingParams(max_new_tokens=longest),
        optimizer=partial(AdamW, lr=1e-6, weight_decay=0.0, fused=True),
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
    trainer.fit(module, PromptDataModule(prompt_texts(8 * prompts), prompts))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
