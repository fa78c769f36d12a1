"""TRL's side of `against_trl.py`: its GRPOTrainer, tuned, in an environment that has TRL and nothing of the library.

Makes a step for each input line, and writes its measurements as a line of JSON. Tuned means: one batch for the whole
rollout, float32, no activation checkpointing, no logs.
"""

import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from measure import peak_memory
from torch import Tensor
from transformers import LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override
from workload import Phases, ScriptedLengths, Workload, workload


def generate_by_script(model: Any, work: Workload, phases: Phases) -> None:
    """Let a model generate by the script, if there is one, and note how long it takes."""
    generate = model.generate

    def scripted(*, input_ids: Tensor, **options: Any) -> Any:
        script = [ScriptedLengths(work.lengths, input_ids.shape[1], work.eos)] if work.lengths else []
        with phases.of("generation"):
            return generate(input_ids=input_ids, logits_processor=LogitsProcessorList(script), **options)

    model.generate = scripted


class TimedTrainer(GRPOTrainer):
    """Notes how long its rollouts and its optimizer steps take, and counts tokens."""

    phases: Phases
    trained = 0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.phases.of("rollout"):
            return super()._prepare_inputs(generation_batch)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Make a rollout and its gradient."""
        with self.phases.of("training step"):
            return super().training_step(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.trained += int(inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)


class Steps(TrainerCallback):
    """Holds the run until it is told to go on."""

    trainer: TimedTrainer

    def __init__(self, work: Workload, phases: Phases) -> None:
        self.work, self.phases, self.drawn, self.reward = work, phases, 0, 0.0
        self.begin()

    def begin(self) -> None:
        """Wait for a line; without one the run is over."""
        if not sys.stdin.readline():
            raise SystemExit
        self.phases.take()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def rewards(self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **row: Any) -> list[float]:
        """Return the rewards, and count the sampled tokens."""
        self.drawn, self.trainer.trained = sum(map(len, completion_ids)), 0
        rewards = self.work.rewards(completions, **row)
        self.reward = fmean(rewards)
        return rewards

    @override
    def on_pre_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        """Begin the optimizer's part of the update."""
        self.before = time.perf_counter(), time.process_time()

    @override
    def on_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        """End it."""
        self.optimizer = time.perf_counter() - self.before[0], time.process_time() - self.before[1]

    @override
    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        """Write what the step took."""
        whole = time.perf_counter() - self.wall, time.process_time() - self.cpu
        seconds = self.phases.take()
        step, rollout, generation = (seconds[name] for name in ("training step", "rollout", "generation"))
        phases = {
            "generation": generation,
            "scoring": [a - b for a, b in zip(rollout, generation, strict=True)],
            "update": [a - b + c for a, b, c in zip(step, rollout, self.optimizer, strict=True)],
        }
        done = {"tokens": [self.drawn, self.trainer.trained], "reward": self.reward, "peak": peak_memory()}
        print(json.dumps({"whole": whole, **phases, **done}), flush=True)
        self.begin()


def main(cell: dict[str, Any]) -> None:
    """Train for as long as there are lines."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    phases, work = Phases(), workload(**cell)
    generate_by_script(work.model, work, phases)
    steps = Steps(work, phases)
    trainer = TimedTrainer(
        model=work.model,
        reward_funcs=steps.rewards,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=cell["prompts"] * cell["group"] // cell["trl_microbatches"],
            gradient_accumulation_steps=cell["trl_microbatches"],
            num_generations=cell["group"],
            max_completion_length=cell["longest"],
            temperature=1.0,
            shuffle_dataset=False,
            seed=cell["seed"],
            learning_rate=cell["rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=1_000_000,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            loss_type="dapo",
            scale_rewards="group",
            epsilon=0.2,
            beta=0.0,
            num_iterations=1,
            mask_truncated_completions=False,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(work.rows),
        processing_class=work.tokenizer,
        callbacks=[steps],
    )
    trainer.phases, steps.trainer = phases, trainer
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
