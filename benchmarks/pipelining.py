"""Generation ahead on separate devices, and on the cores of the trainer.

    python benchmarks/pipelining.py
    python benchmarks/pipelining.py --where cores --width 256
    python benchmarks/pipelining.py --where cores --engine vllm

``devices``: real fits with skewed response lengths, simulated devices (``PacedEngine``, which sleeps) and a trainer
that sleeps: synchronous, ahead, and four ahead sequentially. Fails if four ahead concurrently are not twice as fast
as sequentially.

``cores``: synchronous and one ahead, in interleaved fits, each with one and with two torch threads. One ahead, the
engine's thread has the same number.
"""

import sys
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from measure import Report
from paced import PacedEngine, lognormal_lengths
from torch.optim import AdamW
from transformers import Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import (
    Engine,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    SamplingParams,
    StopOnZeroGradient,
    TransformersEngine,
    VLLMEngine,
)
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Request

PROMPTS, ANSWERS = 16, 8  # of a rollout, and to each of them
FASTER = 2.0  # four ahead at once, held to one rollout after the other
SYNC_SECONDS = 0.02


class Seconds(RLCallback):
    """Of each rollout: all of them, those of the trainer's waiting, of syncs, and the tokens that were drawn.

    Args:
        step: seconds that the trainer sleeps at the end of each rollout.
    """

    name = "seconds"

    def __init__(self, step: float = 0.0) -> None:
        self.step, self.ends = step, list[float]()
        self.phases: dict[str, list[float]] = {"wait": [], "generate": [], "sync": []}
        self.tokens = list[int]()

    @override
    def observe(self, rollout: Any) -> None:
        self.tokens.append(int(rollout.sampled_lengths.sum()))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        time.sleep(self.step)
        self.ends.append(time.perf_counter())
        row = pl_module.run.metrics.values()
        for name, seconds in self.phases.items():
            seconds.append(row.get(f"time/{name}", 0.0))

    def mean_seconds(self, first: int, last: int) -> dict[str, float]:
        """Return the mean over some rollouts, of all and of each phase."""
        total = (self.ends[last] - self.ends[first - 1]) / (last - first + 1)
        return {"total": total} | {name: fmean(each[first : last + 1]) for name, each in self.phases.items()}


def policy_of(width: int, layers: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2 with the vocabulary of the sorting task."""
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


def run_fit(
    engine: Engine, max_staleness: int, rollouts: int, *, width: int, layers: int, tokens: int, step: float = 0.0
) -> Seconds:
    """Seconds of a fit."""
    module = RLLightningModule(
        policy=partial(policy_of, width, layers),
        tokenizer=task.sorting_tokenizer(),
        rewards=task.exactly_sorted,
        group_size=ANSWERS,
        engine=engine,
        sampling=SamplingParams(max_new_tokens=tokens),
        max_staleness=max_staleness,
        optimizer=partial(AdamW, lr=1e-5),
    )
    seconds, data = Seconds(step), PromptDataModule(task.sorting_prompts(rollouts * PROMPTS, seed=0), PROMPTS)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TruncatedIS(), StopOnZeroGradient(patience=None), seconds],
    )
    trainer.fit(module, data)
    return seconds


def on_devices(report: Report, rollouts: int, step: float, sigma: float) -> None:
    """Add fits on devices that only generate."""
    lengths = lognormal_lengths(PROMPTS * ANSWERS, rollouts, mean=24, sigma=sigma, limit=192)

    def script(request: Request) -> list[int]:
        number = request.sample_id % (PROMPTS * ANSWERS)
        return [max(task.PAD, task.EOS) + 1] * (lengths[request.rollout][number] - 1) + [task.EOS]

    took, rows = dict[tuple[int, bool], float](), list[tuple[str, ...]]()
    for staleness, at_once in ((0, True), (1, True), (2, True), (4, True), (4, False)):
        engine = PacedEngine(script, 12 * step / 192, sync_seconds=SYNC_SECONDS, concurrent=at_once)
        seconds = run_fit(engine, staleness, rollouts, width=32, layers=1, tokens=192, step=step)
        if seconds.tokens != list(map(sum, lengths)):
            raise RuntimeError(f"expected {list(map(sum, lengths))} tokens, got {seconds.tokens}")
        mean = seconds.mean_seconds(staleness + 1, rollouts - 1 - staleness)
        took[staleness, at_once] = mean["total"]
        name = f"{staleness}" + ("" if at_once else ", one after the other")
        rows.append((name, f"{mean['total']:.2f}", f"{(mean['wait'] + mean['generate']) / mean['total']:.1%}"))
    title = f"{rollouts} rollouts of {PROMPTS * ANSWERS} answers, sigma {sigma:g}, the longest lasts twelve steps"
    report.rows(title, ("max_staleness", "s per rollout", "idle"), rows)
    faster = took[4, False] / took[4, True]
    report.floor("four ahead: one rollout after the other / all at once", faster, at_least=FASTER)


def on_cores(
    report: Report,
    engine: str,
    rollouts: int,
    rounds: int,
    *,
    width: int,
    layers: int,
    tokens: int,
    threads: tuple[int, ...] = (1, 2),
) -> None:
    """Add medians over rounds of fits on the cores that train as well."""
    found: dict[tuple[int, int], list[float]] = {(s, number): [] for number in threads for s in (0, 1)}
    generating = list[float]()
    for _ in range(rounds):
        for (staleness, number), runs in found.items():
            torch.set_num_threads(number)
            built = VLLMEngine(max_model_len=256 + tokens) if engine == "vllm" else TransformersEngine()
            seconds = run_fit(built, staleness, rollouts, width=width, layers=layers, tokens=tokens)
            mean = seconds.mean_seconds(1, rollouts - 1)
            runs.append(mean["total"])
            generating += [mean["generate"]] if (staleness, number) == (0, 1) else []
    torch.set_num_threads(1)
    base = median(found[0, 1])
    share = median(generating) / base
    rows = [
        (f"{number}", *(f"{base / median(found[staleness, number]):.2f}" for staleness in (0, 1))) for number in threads
    ]
    title = f"{engine}, width {width}, {layers} layers: {rollouts} rollouts of {PROMPTS * ANSWERS} answers"
    report.rows(title, ("threads of each", "synchronous", "one ahead"), rows)
    at_best = 1 / max(share, 1 - share)
    report.rows(
        "Synchronous, one thread",
        ("s per rollout", "generating", "gain at best"),
        [(f"{base:.2f}", f"{share:.0%}", f"{at_best:.2f}")],
    )
    ahead = base / median(found[1, 1])
    report.bound("cores: one ahead gains no more than there is", ahead, at_most=1.05 * at_best)


def main(
    where: Literal["devices", "cores", "both"] = "both",
    engine: Literal["transformers", "vllm"] = "transformers",
    width: int = 256,
    layers: int = 4,
    tokens: int = 24,
    rollouts: int = 16,
    rounds: int = 3,
    step: float = 0.5,
    sigma: float = 1.2,
) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("pipelining")
    if where != "cores":
        on_devices(report, rollouts, step, sigma)
    if where != "devices":
        on_cores(report, engine, max(3, rollouts // 3), rounds, width=width, layers=layers, tokens=tokens)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
