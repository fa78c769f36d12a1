"""The update phase against a bare PyTorch loop, corrections on against off, and what Trainer and logging cost.

    python benchmarks/update.py

A and B alternate in one process on the same rollout and the same microbatches; medians, minima and maxima of several
rounds after a warm-up. The model is that of the quickstart: Qwen2, hidden 128, 4 layers, 0.86 M parameters, float32.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW
from transformers import Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

from lightning_rl import (
    GRPO,
    ClippedSurrogate,
    FakeEngine,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    Sampling,
    token_mean,
)
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import (
    OPSM,
    IcePop,
    NoEOSMask,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    SequenceRatioMask,
    TruncatedIS,
)
from lightning_rl.corrections import Corrections
from lightning_rl.metrics import MetricLog
from lightning_rl.policy import Microbatch, PolicyModel, make_plan
from lightning_rl.update import accumulate_gradient


def model_1m() -> Qwen2ForCausalLM:
    """The quickstart's architecture with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=128,
            num_hidden_layers=4,
            intermediate_size=384,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def random_rollout(rows: int, prompt: int, response: int) -> Rollout:
    """Rows of equal length with everything that a correction may read."""
    draw = torch.Generator().manual_seed(0)
    logprobs = -2.77 + 0.1 * torch.randn(rows, response, generator=draw)
    prompts, responses = (torch.randint(2, 16, (rows, width), generator=draw) for width in (prompt, response))
    rollout = Rollout.of_samples(prompts.tolist(), responses.tolist(), groups=[row // 8 for row in range(rows)])
    return rollout.replace(
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        advantages=torch.randn(rows, 1, generator=draw).expand(-1, response).contiguous(),
    )


def bare_update(
    model: Qwen2ForCausalLM, optimizer: AdamW, rollout: Rollout, microbatches: tuple[Microbatch, ...]
) -> None:
    """What a careful script does: right-padded rows without a mask, PPO's clip, token mean, clip, one fused step."""
    tokens, prompt = int(rollout.valid_tokens.sum()), rollout.prompt_ids.shape[1]
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)
    for microbatch in microbatches:
        rows, targets = ids[microbatch.index], rollout.response_ids[microbatch.index]
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state[:, prompt - 1 :]
        logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        old, advantages = rollout.require("old_logprobs"), rollout.require("advantages")
        ratio, advantage = (logprobs - old[microbatch.index]).exp(), advantages[microbatch.index]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def our_update(
    policy: PolicyModel,
    optimizer: AdamW,
    rollout: Rollout,
    microbatches: tuple[Microbatch, ...],
    callbacks: list[RLCallback],
) -> None:
    """The library's own update stage, every metric included."""
    algorithm = Algorithm(
        loss=ClippedSurrogate(), advantages=GRPO(), reduction=token_mean, corrections=Corrections(callbacks)
    )
    gradient = accumulate_gradient(
        rollout,
        microbatches,
        lambda microbatch: policy(microbatch.layout),
        algorithm,
        backward=lambda loss: loss.backward(),
    )
    log = MetricLog()
    for stats in gradient.stats:
        log.add("microbatch", stats)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Seconds(NamedTuple):
    """Wall-clock and CPU seconds of each round."""

    wall: list[float]
    cpu: list[float]


def interleaved(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, Seconds]:
    """Seconds of every variant, alternating; the first round only warms up."""
    seconds = {name: Seconds([], []) for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number:
                seconds[name].wall.append(time.perf_counter() - wall)
                seconds[name].cpu.append(time.process_time() - cpu)
    return seconds


def table(title: str, seconds: dict[str, Seconds], base: str) -> None:
    """Prints medians and their ratios to one variant. CPU seconds do not see what else the machine does."""
    print(f"\n{title}\n  {'median (minimum), ratio':34s}{'wall':>26s}{'CPU':>28s}")
    for name, both in seconds.items():
        cells = [
            f"{median(own):8.4f} ({min(own):.4f}) {median(own) / median(other):6.3f}"
            for own, other in zip(both, seconds[base], strict=True)
        ]
        print(f"  {name:34s}{cells[0]:>26s}{cells[1]:>28s}")


def update_phase(rounds: int) -> None:
    """256 rows of 16 + 64 tokens in microbatches of 2,560 tokens."""
    rollout = random_rollout(256, 16, 64)
    microbatches = make_plan(rollout, minibatches=1, token_budget=2560).step(0)
    bare, policy = model_1m(), PolicyModel(model_1m(), None, temperature=1.0, packed=True)
    builds = partial(AdamW, lr=1e-5, weight_decay=0.0, fused=True)
    bare_optimizer, optimizer = builds(bare.parameters()), builds(policy.parameters())
    corrections: list[RLCallback] = [
        NoEOSMask(),
        OPSM(),
        RolloutKL(),
        ReferenceKL(as_loss=True),
        TruncatedIS(),
        IcePop(),
        SequenceRatioMask("geometric"),
        SequenceRatioMask("product").with_name("product"),
        OutlierMask(),
        OverlongPenalty(64, 16),
    ]
    plain, corrected = "update stage, no correction", "update stage, largest legal set"
    seconds = interleaved(
        {
            "bare loop": lambda: bare_update(bare, bare_optimizer, rollout, microbatches),
            plain: lambda: our_update(policy, optimizer, rollout, microbatches, []),
            corrected: lambda: our_update(policy, optimizer, rollout, microbatches, corrections),
        },
        rounds,
    )
    table(f"Update phase, 256 x 80 tokens, {len(microbatches)} microbatches, seconds", seconds, "bare loop")
    cost = median(seconds[corrected].cpu) / median(seconds[plain].cpu) - 1
    print(f"  corrections on against off: {cost:+.1%} of the update phase, CPU time")
    reference_pass(policy, microbatches, rounds)


def reference_pass(policy: PolicyModel, microbatches: tuple[Microbatch, ...], rounds: int) -> None:
    """One forward over all rows without gradient: what a reference or an old pass adds."""

    @torch.no_grad()
    def forward() -> None:
        for microbatch in microbatches:
            policy(microbatch.layout)

    table("Reference (or old) pass alone, seconds", interleaved({"forward": forward}, rounds), "forward")


class StepTimes(Callback):
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.seconds = Seconds([], [])
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.seconds.wall.append(wall - self.wall)
        self.seconds.cpu.append(cpu - self.cpu)
        self.wall, self.cpu = wall, cpu


def alternating_reward(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Some spread within a group."""
    return [float(place % 2) for place, _ in enumerate(zip(prompts, completions, strict=True))]


def fitted_steps(steps: int) -> Seconds:
    """One epoch of one rollout that serves many steps; the first half warms up."""
    times, scripted = StepTimes(), (5, 6, 7, 8, 9, 10, 11, 1)
    module = RLLightningModule(
        model_1m,
        alternating_reward,
        engine=FakeEngine(lambda _request: scripted),
        group_size=8,
        epochs=steps,
        sampling=Sampling(max_new_tokens=8),
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[times],
        logger=CSVLogger(tempfile.mkdtemp()),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, PromptDataModule([[2, 3, 4, 5]], 1))
    return Seconds(times.seconds.wall[steps // 2 :], times.seconds.cpu[steps // 2 :])


def trainer_overhead(rounds: int, steps: int = 100) -> None:
    """Steps of one microbatch within ``Trainer.fit``, CSV logging of every metric, against the bare step alone."""
    rollout, bare = random_rollout(8, 4, 8), model_1m()
    microbatch = make_plan(rollout, minibatches=1, token_budget=4096).step(0)
    optimizer = AdamW(bare.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    alone, fitted = Seconds([], []), Seconds([], [])
    for _ in range(rounds):
        one = interleaved({"bare": lambda: bare_update(bare, optimizer, rollout, microbatch)}, steps // 2)["bare"]
        for total, part in ((alone, one), (fitted, fitted_steps(steps))):
            total.wall.append(median(part.wall))
            total.cpu.append(median(part.cpu))
    seconds = {"bare step": alone, "Trainer, CSV logging, every metric": fitted}
    table("One optimizer step of one microbatch (8 x 12 tokens), seconds", seconds, "bare step")
    wall, cpu = (1e3 * (median(more) - median(less)) for more, less in zip(fitted, alone, strict=True))
    print(f"  Trainer, logging and metrics: {wall:.2f} ms wall, {cpu:.2f} ms CPU per optimizer step")


def main(rounds: int = 7, threads: int = 1) -> None:
    """Run all three comparisons."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {threads} thread(s), {rounds} rounds")
    update_phase(rounds)
    trainer_overhead(rounds)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
