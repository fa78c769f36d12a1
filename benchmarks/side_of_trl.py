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
from typing import Any

import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from transformers import LogitsProcessorList, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override
from workload import SIZES, Phases, ScriptedLengths, lengths_of, prompt_texts, qwen2, rewards_by_place, words


class ScriptedModel(Qwen2ForCausalLM):
    """Generates by the script, and notes how long it takes."""

    script: ScriptedLengths
    phases: Phases

    @override
    def generate(self, *arguments: Any, **options: Any) -> Any:
        with self.phases.of("generation"):
            scripted = LogitsProcessorList([self.script])
            return super().generate(*arguments, logits_processor=scripted, **options)  # pyrefly: ignore[bad-argument-type]


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
        self.trained = int(inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)


class Steps(TrainerCallback):
    """Holds the run until it is told to go on."""

    trainer: TimedTrainer

    def __init__(self, phases: Phases) -> None:
        self.phases, self.drawn = phases, 0
        self.begin()

    def begin(self) -> None:
        """Wait for a line; without one the run is over."""
        if not sys.stdin.readline():
            raise SystemExit
        self.phases.take()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def rewards(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Return the rewards, and count the sampled tokens."""
        self.drawn = sum(map(len, completion_ids))
        return rewards_by_place(completions)

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
        print(json.dumps({"whole": whole, **phases, "tokens": [self.drawn, self.trainer.trained]}), flush=True)
        self.begin()


def main(cell: dict[str, Any]) -> None:
    """Train for as long as there are lines."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    prompts, group, longest = cell["prompts"], cell["group"], cell["longest"]
    torch.manual_seed(0)
    phases, model = Phases(), ScriptedModel(qwen2(SIZES[cell["size"]]))
    model.script = ScriptedLengths(lengths_of(cell["lengths"], prompts * group, longest))
    model.phases = phases
    steps = Steps(phases)
    trainer = TimedTrainer(
        model=model,
        reward_funcs=steps.rewards,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=prompts * group,
            gradient_accumulation_steps=1,
            num_generations=group,
            max_completion_length=longest,
            learning_rate=1e-6,
            max_steps=1_000_000,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            beta=0.0,
            num_iterations=1,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompt_texts(8 * prompts)]),
        processing_class=words(),
        callbacks=[steps],
    )
    trainer.phases, steps.trainer = phases, trainer
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
