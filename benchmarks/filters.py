"""Sampling filters at a large vocabulary: seconds to select the allowed tokens, relative to the vocabulary head.

    python benchmarks/filters.py

Rows of log-probabilities over a vocabulary of 151,936, from normal logits: peaked ones, whose nucleus is a few hundred
tokens, and flat ones, whose nucleus is a fifth of the vocabulary, so that it has to be sorted. "head" is the matrix
product that makes logits, "sorted" all three filters by sorting every row whole, as a plain implementation does.
"""

import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from jsonargparse import auto_cli
from measure import MIN_ROUNDS, Report, take_turns
from torch import Tensor

from lightning_rl import SamplingParams
from lightning_rl.generation.sampling_params import RowFilters

TOP_K, TOP_P, MIN_P = 50, 0.95, 0.05
FILTERS = {
    "top_k": SamplingParams(top_k=TOP_K),
    "top_p": SamplingParams(top_p=TOP_P),
    "min_p": SamplingParams(min_p=MIN_P),
    "all three": SamplingParams(top_k=TOP_K, top_p=TOP_P, min_p=MIN_P),
}
LIMITS = {
    "peaked": {"top_k": 0.5, "top_p": 0.5, "min_p": 0.1, "all three": 0.5},
    "flat": {"top_k": 0.5, "top_p": 2.0, "min_p": 0.1, "all three": 0.5},
}


def by_sorting(logprobs: Tensor) -> Tensor:
    """Apply all three filters by one sort of each row."""
    scores, order = logprobs.sort(-1, descending=True)
    kept = scores >= scores[:, :1] + torch.tensor(MIN_P).log()
    kept[:, TOP_K:] = False
    mass = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    kept &= mass.cumsum(-1) - mass < TOP_P
    return torch.zeros_like(kept).scatter_(1, order, kept)


def work(run: Callable[[], Tensor]) -> int:
    """Run it; returns the rows that have a token left."""
    return int(run().any(-1).sum())


def compare(report: Report, name: str, scores: Tensor, head: Callable[[], Tensor], rounds: int) -> None:
    """Add the tables and bounds of some log-probabilities."""
    rows = len(scores)
    masks = {
        which: partial(RowFilters([sampling] * rows, scores.device).mask, scores, torch.arange(rows))
        for which, sampling in FILTERS.items()
    }
    differing = int((masks["all three"]() != by_sorting(scores)).sum())
    report.bound(f"{name}: tokens that sorting keeps and the filters do not, or the reverse", differing, at_most=0)
    runs = {"head": head, **masks, "sorted": partial(by_sorting, scores)}
    seconds = take_turns({which: partial(work, run) for which, run in runs.items()}, rounds, tokens=rows)
    report.table(f"{name}: {rows} rows, vocabulary {scores.shape[1]}, float32", seconds, base="head")
    kept = [(which, f"{mask().sum() / rows:.0f}") for which, mask in masks.items()]
    report.rows(f"{name}: tokens that a row keeps", ("", "mean"), kept)
    for which, at_most in LIMITS[name].items():
        cost = median(seconds[which].of_all(seconds["head"]).cpu)
        report.bound(f"{name}, {which}: CPU seconds, of the head", cost, at_most=at_most)


def main(
    *, vocabulary: int = 151_936, width: int = 896, rows: int = 16, rounds: int = MIN_ROUNDS, quick: bool = False
) -> None:
    """Compare each filter with the head, for peaked rows and for flat ones."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report, draw = Report("filters"), torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw)
    weight = torch.randn(vocabulary // 100 if quick else vocabulary, width, generator=draw) / width**0.5
    for name, deviation in (("peaked", 5.0), ("flat", 2.5)):
        scores = (deviation * (hidden @ weight.t())).log_softmax(-1)
        compare(report, name, scores, partial(torch.mm, hidden, weight.t()), rounds)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
