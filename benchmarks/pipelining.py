"""Sequential against pipelined: seconds of the same rollouts with max_staleness=0 and 1, in interleaved fits.

    python benchmarks/pipelining.py
    python benchmarks/pipelining.py --engine vllm --width 256

One torch thread each for the trainer and for the engine in its thread, so two cores are what a pipelined run can use.
"Hidden" is the part of the generation that nobody waited for; "bound" is what no pipeline of these two halves can
beat: for each rollout the longer of generating and training, and the shorter one once, while the pipeline fills.
Both are of one rollout after another in the sequential fits, so other work on the machine moves all numbers alike.
"""

import sys
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from torch.optim import AdamW
from transformers import Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

from lightning_rl import Sampling

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import Engine, PromptDataModule, RLCallback, RLLightningModule, TransformersEngine, VLLMEngine
from lightning_rl.callbacks import TruncatedIS

ANSWERS = 8  # to each of 16 prompts


class Seconds(RLCallback):
    """Of training after the first rollout, with which an engine starts, and of some phases of it."""

    name = "seconds"

    def __init__(self) -> None:
        self.phases = {"wait": 0.0, "draw": 0.0}
        self.total, self._last = 0.0, 0.0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch.index:
            self.total += now - self._last
            for name in self.phases:
                self.phases[name] += pl_module.run.metrics.values().get(f"time/{name}", 0.0)
        self._last = now


def policy_of(width: int, layers: int) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 that knows the words of the sorting task."""
    config = Qwen2Config(
        vocab_size=len(task.WORDS),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=task.EOS,
        pad_token_id=task.PAD,
    )
    torch.default_generator.manual_seed(0)
    return Qwen2ForCausalLM(config)


def fitted(engine: Engine, max_staleness: int, width: int, layers: int, tokens: int, rollouts: int) -> Seconds:
    """Seconds of a fit."""
    module = RLLightningModule(
        policy=partial(policy_of, width, layers),
        tokenizer=task.sorting_tokenizer(),
        rewards=task.exactly_sorted,
        group_size=ANSWERS,
        engine=engine,
        sampling=Sampling(max_new_tokens=tokens),
        max_staleness=max_staleness,
        optimizer=partial(AdamW, lr=1e-5),
    )
    seconds, data = Seconds(), PromptDataModule(task.sorting_prompts(rollouts * 16, seed=0), 16)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TruncatedIS(), seconds],
    )
    trainer.fit(module, data)
    return seconds


def main(
    engine: Literal["transformers", "vllm"] = "transformers",
    width: int = 256,
    layers: int = 4,
    tokens: int = 24,
    rollouts: int = 9,
    rounds: int = 5,
) -> None:
    """Prints medians over ``rounds`` of fits."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[int, list[Seconds]] = {0: [], 1: []}
    for _ in range(rounds):
        for staleness, runs in found.items():
            built = VLLMEngine(max_model_len=256 + tokens) if engine == "vllm" else TransformersEngine()
            runs.append(fitted(built, staleness, width, layers, tokens, rollouts))
    sequential, pipelined = (median(run.total for run in found[staleness]) for staleness in found)
    generating = median(run.phases["draw"] for run in found[0])
    training, waiting = sequential - generating, median(run.phases["wait"] for run in found[1])
    number, rows = rollouts - 1, 16 * ANSWERS
    bound = max(generating, training) + min(generating, training) / number
    print(f"{engine}, width {width}, {layers} layers; {number} rollouts of {rows} answers of at most {tokens} tokens")
    print(f"sequential {sequential:7.2f} s   (generating {generating:.2f}, training {training:.2f})")
    print(f"pipelined  {pipelined:7.2f} s   (waiting {waiting:.2f}, hidden {max(generating - waiting, 0):.2f})")
    print(f"bound      {bound:7.2f} s")
    print(f"pipelined / sequential {pipelined / sequential:.2f}, at best {bound / sequential:.2f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
