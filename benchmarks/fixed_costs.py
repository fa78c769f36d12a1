"""Overhead of a run without its model: per optimizer step, and per rollout.

    python benchmarks/fixed_costs.py

An optimizer step of the tiniest model within ``Trainer.fit``, with every metric and a CSV row for each step, is
compared with the same step in a bare loop; without corrections and with four. A rollout of 256 responses of 64 tokens
comes from a scripted engine whose own time does not count, and no pass of the model belongs to it; the reward reads the
text of each response, or only its tokens.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from measure import MIN_ROUNDS, Report, Seconds
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM
from typing_extensions import override
from workload import SIZES, qwen2, words

from lightning_rl import FakeEngine, PromptDataModule, RLCallback, RLLightningModule, SamplingParams
from lightning_rl.callbacks import OPSM, NoEOSMask, RolloutKL, TruncatedIS
from lightning_rl.data import StepIndex
from lightning_rl.generation import Completion, Request

PROMPT, RESPONSE, GROUP, STEPS = (2, 3, 4, 5), (5, 6, 7, 8, 9, 10, 11, 1), 8, 60
ROWS, TOKENS, ROLLOUTS = 256, 64, 12


def tiniest_model() -> Qwen2ForCausalLM:
    """One layer of width 8."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(qwen2(SIZES["tiniest"]))


def by_text(completions: Sequence[str], **_: Any) -> list[float]:
    """Read every text."""
    return [float(len(text) % 2 + place % 2) for place, text in enumerate(completions)]


def by_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Read no text."""
    return [float(place % 2) for place, _ in enumerate(completion_ids)]


class StepSeconds(Callback):
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.seconds = Seconds([], [])
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        """Record a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.seconds.add(wall - self._wall, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu


class ScriptedEngine(FakeEngine):
    """Notes the seconds that it takes itself."""

    def __init__(self, script: Callable[[Request], Any]) -> None:
        super().__init__(script)
        self.taken = Seconds([], [])

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        wall, cpu = time.perf_counter(), time.process_time()
        drawn = super().generate_batch(requests, logprobs=logprobs)
        self.taken.add(time.perf_counter() - wall, time.process_time() - cpu)
        return drawn


class RolloutSeconds(RLLightningModule):
    """Notes the seconds that its rollouts take, those of the engine aside."""

    seconds: Seconds

    @override
    def on_train_batch_start(self, batch: StepIndex, batch_idx: int) -> None:
        """Make a rollout."""
        wall, cpu = time.perf_counter(), time.process_time()
        super().on_train_batch_start(batch, batch_idx)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if isinstance(engine := self.options.engine, ScriptedEngine):
            self.seconds.add(wall - engine.taken.wall[-1], cpu - engine.taken.cpu[-1])


def trainer_with(callbacks: Sequence[Callback]) -> Trainer:
    """One epoch on the CPU with a CSV row for each step."""
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=CSVLogger(tempfile.mkdtemp()),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def step_seconds(corrections: Sequence[RLCallback]) -> Seconds:
    """Of the optimizer steps of one rollout of a group; the first half warms up."""
    times = StepSeconds()
    module = RLLightningModule(
        tiniest_model,
        by_tokens,
        engine=FakeEngine(lambda _: RESPONSE),
        group_size=GROUP,
        epochs_per_rollout=2 * STEPS,
        sampling=SamplingParams(max_new_tokens=len(RESPONSE)),
        optimizer=partial(AdamW, lr=1e-5, fused=True),
    )
    trainer_with([times, *corrections]).fit(module, PromptDataModule([list(PROMPT)], 1))
    if len(times.seconds.cpu) != 2 * STEPS:
        raise RuntimeError(f"expected {2 * STEPS} optimizer steps, got {len(times.seconds.cpu)}")
    return times.seconds.tail(STEPS)


def bare_seconds() -> Seconds:
    """Of the same steps by a careful script: log-probabilities, PPO's clip, token mean, clipped norm, a fused step."""
    model, seconds = tiniest_model(), Seconds([], [])
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.tensor([[*PROMPT, *RESPONSE]] * GROUP)
    targets, advantages = ids[:, len(PROMPT) :], torch.tensor([1.0, -1.0] * (GROUP // 2))[:, None]
    old = torch.full(targets.shape, -2.7)
    for _ in range(2 * STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, len(PROMPT) - 1 :]
        logprobs = model.lm_head(hidden).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        ratio = (logprobs - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.add(time.perf_counter() - wall, time.process_time() - cpu)
    return seconds.tail(STEPS)


def rollout_seconds(reward: Callable[..., list[float]]) -> Seconds:
    """Of rollouts without the time of engine and optimizer; the first two warm up."""
    script = tuple(2 + place % 14 for place in range(TOKENS))
    module = RolloutSeconds(
        tiniest_model,
        reward,
        engine=ScriptedEngine(lambda _: script),
        tokenizer=words(),
        group_size=GROUP,
        sampling=SamplingParams(max_new_tokens=TOKENS),
        optimizer=partial(AdamW, lr=1e-5, fused=True),
    )
    module.seconds = Seconds([], [])
    prompts = ROWS // GROUP
    trainer_with([]).fit(module, PromptDataModule([list(PROMPT)] * prompts * ROLLOUTS, prompts))
    if len(module.seconds.cpu) != ROLLOUTS:
        raise RuntimeError(f"expected {ROLLOUTS} rollouts, got {len(module.seconds.cpu)}")
    return module.seconds.tail(ROLLOUTS - 2)


def in_turn(variants: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, Seconds]:
    """Measure the medians of each round of every variant, in turn."""
    seconds = {name: Seconds([], []) for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            part = run()
            seconds[name].add(median(part.wall), median(part.cpu))
    return seconds


def main(*, rounds: int = MIN_ROUNDS, threads: int = 1, quick: bool = False) -> None:
    """Print both tables."""
    rounds = 1 if quick else rounds
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report = Report("fixed_costs")
    four = [NoEOSMask, OPSM, RolloutKL, TruncatedIS]
    steps = in_turn(
        {
            "bare step": bare_seconds,
            "Trainer, CSV, every metric": lambda: step_seconds([]),
            "the same with four corrections": lambda: step_seconds([make() for make in four]),
        },
        rounds,
    )
    report.table(f"An optimizer step of {GROUP} x {len(PROMPT) + len(RESPONSE)} tokens", steps, base="bare step")
    rollouts = in_turn({"text": lambda: rollout_seconds(by_text), "tokens": lambda: rollout_seconds(by_tokens)}, rounds)
    report.table(f"A rollout of {ROWS} x {TOKENS}, by what the reward reads", rollouts, base="text")
    bare, plain, corrected = (1e3 * median(both.cpu) for both in steps.values())
    report.bound("ms of CPU of an optimizer step over a bare one", plain - bare, at_most=2)
    report.bound("the same with four corrections", corrected - bare, at_most=2)
    report.bound("ms of CPU of a rollout", 1e3 * median(rollouts["text"].cpu), at_most=10)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
