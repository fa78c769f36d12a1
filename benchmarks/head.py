"""The vocabulary head against naive logits: seconds and memory, forward and backward.

    python benchmarks/head.py

Naive: logits, ``log_softmax``, gather, and the entropy without gradient. Both compute the gradient of the
log-probabilities of the same tokens; values and gradients are compared first. Memory is the growth of the peak of a
process over weight, hidden states and the returned gradients. Frozen: the weight has no gradient, as under adapters.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from jsonargparse import auto_cli
from measure import Report, peak_memory, take_turns
from torch import Tensor

from lightning_rl.policy.logprobs import token_logprobs

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    scores = torch.mm(hidden, weight.t()).log_softmax(-1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, targets[:, None])[:, 0], entropy


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk by chunk."""
    logprobs, entropy = token_logprobs(hidden, weight, None, targets)
    return logprobs, entropy.detach()


VARIANTS: dict[str, Score] = {"naive": naive, "token_logprobs": ours}
FROZEN: dict[str, Score] = {f"{name}, frozen": score for name, score in VARIANTS.items()}


def inputs(vocabulary: int, width: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, generator=draw)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw)


def work(score: Score, hidden: Tensor, weight: Tensor, targets: Tensor) -> int:
    """Forward and backward; returns the number of tokens that got a gradient."""
    hidden.grad = weight.grad = None
    logprobs, _ = score(hidden, weight, targets)
    torch.dot(logprobs, torch.linspace(-1, 2, len(logprobs))).backward()
    return 0 if hidden.grad is None else int(hidden.grad.any(-1).sum())


def largest_difference(hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Of values and gradients of the two, relative to the largest of each."""
    results: list[list[Tensor]] = []
    for score in VARIANTS.values():
        values = score(hidden, weight, targets)
        work(score, hidden, weight, targets)
        results.append(
            [tensor.detach().clone() for tensor in (*values, hidden.grad, weight.grad) if tensor is not None]
        )
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))


def growth(name: str, vocabulary: int, width: int, tokens: int) -> None:
    """Print the bytes by which the peak of this process grows, beyond the gradients that are returned."""
    hidden, weight, targets = inputs(vocabulary, width, tokens)
    baseline = [tensor.detach().clone() for tensor in (hidden, weight)]  # of the size of the gradients
    before = peak_memory()
    del baseline
    work(VARIANTS[name], hidden, weight, targets)
    print(peak_memory() - before)


def main(
    *,
    vocabulary: int = 151_936,
    width: int = 896,
    tokens: int = 2048,
    rounds: int = 5,
    threads: int = 1,
    memory_of: str = "",
    quick: bool = False,
) -> None:
    """Compare the two, or says what memory one of them takes."""
    vocabulary = vocabulary // 20 if quick else vocabulary
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    if memory_of:
        growth(memory_of, vocabulary, width, tokens)
        return
    report, given = Report("head"), inputs(vocabulary, width, tokens)
    report.bound("largest relative difference", largest_difference(*given), at_most=1e-4)
    hidden, weight, targets = given
    frozen = hidden, weight.detach(), targets
    report.bound("largest relative difference, frozen", largest_difference(*frozen), at_most=1e-4)
    variants = {name: partial(work, score, *given) for name, score in VARIANTS.items()}
    variants |= {name: partial(work, score, *frozen) for name, score in FROZEN.items()}
    seconds = take_turns(variants, rounds, tokens=tokens)
    title = f"Head, forward and backward: vocabulary {vocabulary}, hidden {width}, {tokens} tokens, float32"
    report.table(title, seconds, base="naive")
    sizes = [f"--vocabulary={vocabulary}", f"--width={width}", f"--tokens={tokens}", f"--threads={threads}"]
    command = [sys.executable, __file__, *sizes]
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    memory = {name: int(run([*command, f"--memory_of={name}"]).stdout) for name in VARIANTS}
    rows = [(name, f"{number / 2**20:.0f}", f"1/{memory['naive'] / number:.1f}") for name, number in memory.items()]
    report.rows("Memory beyond weight, hidden states and their gradients", ("", "MiB", "of naive"), rows)
    report.bound(
        "GiB of token_logprobs", memory["token_logprobs"] / 2**30, at_most=1.2
    )  # it keeps at most 1 GiB of logits
    cpu = {name: median(both.cpu) for name, both in seconds.items()}
    report.bound("CPU seconds, of naive", cpu["token_logprobs"] / cpu["naive"], at_most=1.05)
    both = [cpu[name] for name in FROZEN]
    report.bound("CPU seconds, of naive, frozen", both[1] / both[0], at_most=1.05)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
