"""Weights into the embedded engine's own copy: GB/s of a sync against a bare copy of the same memory.

    python benchmarks/weight_sync.py

A sync writes every parameter of the policy into the model that decodes, as it does ahead of the trainer. The bare copy
is ``copy_`` of one tensor of as many bytes. With the canary, the sync is proved by one forward of each model.
"""

import warnings
from functools import partial
from statistics import median

import torch
from jsonargparse import auto_cli
from measure import MIN_ROUNDS, Report, take_turns
from transformers import PreTrainedModel, Qwen2ForCausalLM
from workload import Size, qwen2

from lightning_rl import TransformersEngine


def sync(engine: TransformersEngine, policy: PreTrainedModel, copy: PreTrainedModel) -> int:
    """Change the policy and sync all weights; return the number of received bytes."""
    engine.load_weights(((name, weight.detach()) for name, weight in policy.named_parameters()), 0)
    pairs = zip(policy.parameters(), copy.parameters(), strict=True)
    return sum(new.nbytes for new, old in pairs if old.flatten()[-1] == new.flatten()[-1])


def bare(source: torch.Tensor, target: torch.Tensor) -> int:
    """One copy; returns its bytes."""
    return target.copy_(source).nbytes


def main(
    *, width: int = 1024, layers: int = 12, vocabulary: int = 32_768, rounds: int = MIN_ROUNDS, quick: bool = False
) -> None:
    """Compare the two; by default 0.75 GB in float32."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    width, layers = (64, 2) if quick else (width, layers)
    config = qwen2(Size(width, layers, 3 * width, width // 64), vocabulary)
    policy, copy = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config)
    engine = TransformersEngine(canary=False)
    engine.start(copy, None, device=copy.device, dtype=copy.dtype)
    size = sum(weight.nbytes for weight in policy.parameters())
    source, target = torch.rand(size // 4), torch.zeros(size // 4)
    report = Report("weight_sync")
    variants = {"memcpy": partial(bare, source, target), "sync": partial(sync, engine, policy, copy)}
    seconds = take_turns(variants, rounds, tokens=size)
    report.table(f"{size / 1e9:.2f} GB in {len(list(policy.parameters()))} parameters", seconds, base="memcpy")
    rates = [(name, f"{size / 1e9 / median(both.cpu):.2f}") for name, both in seconds.items()]
    report.rows("Rate", ("", "GB/s of CPU time"), rates)
    cost = median(seconds["sync"].of_all(seconds["memcpy"]).cpu)
    report.bound("CPU seconds of a sync, of memcpy", cost, at_most=1.25)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
