"""The quickstart with an engine of rounded weights: accuracy and mismatch, with and without a correction.

    python benchmarks/quantized_rollouts.py                                    # every row, five seeds: an hour
    python benchmarks/quantized_rollouts.py --engines '["full", "int3"]' --seeds 1

The engine decodes with a copy of the policy whose matrices are rounded at each sync; the trainer updates exact weights.
Each fit ends with the accuracy of the exact weights on held-out lists, greedy, and with ``kl/rollout``, the mean of the
first and the last ten rollouts. Fails if the best correction loses more than 0.03 of the accuracy of exact weights.
"""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from measure import Report
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

from lightning_rl import (
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    SamplingParams,
    TransformersEngine,
    warmup_then_linear,
)
from lightning_rl.callbacks import IcePop, NoEOSMask, ScoreCentering, TruncatedIS

ENDS = 10  # rollouts of kl/rollout, first and last
NEAR = 0.03  # accuracy
Rounding = Callable[[Tensor], Tensor]


def integers(weight: Tensor, bits: int) -> Tensor:
    """Round each row to signed integers of some bits times its largest weight."""
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (weight / scale).round().clamp(-top, top) * scale


def e4m3(weight: Tensor, *, scaled: bool) -> Tensor:
    """Cast to float8 e4m3, as it is or with each matrix scaled to the largest number of the format."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.abs().max() / largest if scaled else torch.ones((), dtype=weight.dtype)
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


ENGINES: Mapping[str, Rounding] = {
    "full": lambda weight: weight,
    "int8": partial(integers, bits=8),
    "e4m3": partial(e4m3, scaled=True),
    "e4m3 cast": partial(e4m3, scaled=False),
    "int4": partial(integers, bits=4),
    "int3": partial(integers, bits=3),
}
CORRECTIONS: Mapping[str, Callable[[], list[RLCallback]]] = {
    "none": list,
    "TruncatedIS": lambda: [TruncatedIS()],
    "IcePop": lambda: [IcePop()],
    "ScoreCentering": lambda: [ScoreCentering(None)],
}


class RoundedEngine(TransformersEngine):
    """Decodes with a copy of the policy whose matrices are rounded.

    Args:
        rounding: Function from a matrix to the rounded one.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__(canary=None)  # which would find the rounding
        self.capabilities = replace(self.capabilities, shares_policy=False)
        self.rounding = rounding

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().start(copy.deepcopy(model), tokenizer, device=device, dtype=dtype)

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        rounded = ((name, self.rounding(one) if one.dim() == 2 else one) for name, one in weights)
        super().load_stream(rounded, version)


class Mismatch(DummyLogger):
    """Collects ``kl/rollout`` of every rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.kl: list[float] = []

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.kl += [metrics["kl/rollout"]] if "kl/rollout" in metrics else []


def fit(rounding: Rounding, corrections: Sequence[RLCallback], seed: int, rollouts: int) -> tuple[float, float, float]:
    """Return the accuracy after a run of the quickstart, and the mismatch at its beginning and at its end."""
    held_out, mismatch, engine = task.held_out_prompts(), Mismatch(), RoundedEngine(rounding)
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed), tokenizer=task.sorting_tokenizer(), rewards=task.exactly_sorted,
        engine=engine, sampling=SamplingParams(max_new_tokens=12), advantages="grpo", group_size=8,
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(min(5, rollouts // 2), rollouts), seed=seed,
    )  # fmt: skip
    rows = task.sorting_prompts(rollouts * 32, seed=seed, exclude=held_out)
    data = PromptDataModule(rows, 32, validation=held_out, seed=seed)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, logger=mismatch, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, limit_val_batches=0,
        callbacks=[NoEOSMask(), *corrections],
    )  # fmt: skip
    trainer.fit(module, data)
    engine.rounding = ENGINES["full"]
    judge = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    accuracy = judge.validate(module, data, verbose=False)[0]["val/reward/task"]
    return accuracy, fmean(mismatch.kl[:ENDS]), fmean(mismatch.kl[-ENDS:])


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean and range."""
    return f"{fmean(values):.{digits}g} [{min(values):.{digits}g}..{max(values):.{digits}g}]"


def main(
    *,
    engines: Sequence[str] = ("full", "int8", "e4m3", "int3"),
    corrections: Sequence[str] = tuple(CORRECTIONS),
    seeds: int = 5,
    rollouts: int = 50,
) -> None:
    """Fit the quickstart with every engine and correction, and compare accuracy and mismatch.

    Args:
        engines: Roundings of the engine's weights; the exact weights run without correction alone.
        corrections: Corrections of the mismatch.
        seeds: Number of seeds.
        rollouts: Number of rollouts of a fit.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report = Report("quantized_rollouts", {"seeds": seeds, "rollouts": rollouts})
    rows = [(name, one) for name in engines for one in (corrections if name != "full" else ("none",))]
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {row: [] for row in rows}
    for seed in range(seeds):
        for engine, correction in rows:
            accuracy, first, last = fit(ENGINES[engine], CORRECTIONS[correction](), seed, rollouts)
            found[engine, correction].append((accuracy, first, last))
            line = f"seed {seed}, {engine}, {correction}: accuracy {accuracy:.3f}, kl/rollout {first:.2g} to {last:.2g}"
            print(line, flush=True)
    columns = {row: [list(column) for column in zip(*values, strict=True)] for row, values in found.items()}
    head = ("engine", "correction", "accuracy", "kl/rollout, first ten", "last ten")
    table = [(*row, spread(one, 3), spread(first, 2), spread(last, 2)) for row, (one, first, last) in columns.items()]
    report.rows("mean [least..most] of the seeds", head, table)
    means = {row: [fmean(column) for column in each] for row, each in columns.items()}
    others = [one for one in corrections if one != "none"]
    for engine in [one for one in engines if one != "full"] if others and {("full", "none")} <= means.keys() else ():
        exact, alone = means["full", "none"][0], means[engine, "none"][0]
        best = max(means[engine, one][0] for one in others)
        title = f"{engine}: accuracy lost with the best correction, {exact - alone:.3f} alone"
        report.bound(title, exact - best, at_most=NEAR)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
