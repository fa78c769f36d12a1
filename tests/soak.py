"""Soak: the tiny model for many rollouts with every kind of callback at once, and what grows meanwhile.

    python -m tests.soak --rollouts 2000

Memory, file descriptors, threads, processes and temporary files are counted every ten rollouts, after a garbage
collection; the first fifth is warm-up. Exits with 1 if anything grows.
"""

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import psutil
import torch
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import (
    AdaptiveKL,
    DynamicSampling,
    EntropyBonus,
    NoEOSMask,
    OutlierMask,
    OverlongPenalty,
    SequenceRatioMask,
    TruncatedIS,
)
from lightning_rl.recording import RolloutRecorder
from lightning_rl.reporting import SampleTable

EVERY = 10  # rollouts between two looks
WARM_UP = 0.2  # share of the run
RATE = 1e-6  # so that the last rollouts are like the first ones
MAX_SLOPE = 1.0  # MiB per 100 rollouts
MAX_SLOWER = 1.25  # median seconds of the processor for a rollout, last quarter over the first after the warm-up


@dataclass
class Look:
    """Resources in use after a rollout."""

    rollout: int
    memory: float  # MiB
    descriptors: int
    threads: int
    processes: int
    files: int


@dataclass
class Watch(Callback):
    """Looks every :data:`EVERY` rollouts.

    Args:
        folder: of the run, in which nothing half written may stay.
    """

    folder: Path
    looks: list[Look] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    begin: float = 0.0

    def __hash__(self) -> int:
        """Callbacks are told apart by identity."""
        return id(self)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch.step == 0:
            self.begin = time.process_time()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.step != pl_module.steps_per_rollout - 1:
            return
        self.seconds.append(time.process_time() - self.begin)
        if batch.rollout % EVERY == 0:
            self.looks.append(self.look(batch.rollout))

    def look(self, rollout: int) -> Look:
        """Counts."""
        gc.collect()
        process = psutil.Process()
        temporary = list(Path(tempfile.gettempdir()).rglob("*"))
        parts = [path for path in self.folder.rglob("*") if ".part" in path.name]
        return Look(
            rollout=rollout,
            memory=process.memory_info().rss / 2**20,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            processes=len(process.children(recursive=True)),
            files=len(temporary) + len(parts),
        )


def soak(rollouts: int, folder: Path) -> Watch:
    """Trains; temporary files go to a folder of this run's own."""
    (folder / "temporary").mkdir()
    watch, per_rollout = Watch(folder), 4
    callbacks: list[Callback] = [
        DynamicSampling(max_rounds=2), NoEOSMask(), OverlongPenalty(8, 2), AdaptiveKL(0.02, as_loss=True),
        EntropyBonus(0.01), TruncatedIS(), SequenceRatioMask("geometric"), OutlierMask(), SignalAudit(), SignalLedger(),
        RolloutRecorder(folder / "recorded", 10, keep=3), SampleTable(every_n_rollouts=50), LearningRateMonitor(),
        ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=20, save_top_k=2, monitor="step", mode="max"),
        watch,
    ]  # fmt: skip
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "temporary")
    try:
        _train(rollouts, folder, callbacks, per_rollout)
    except SystemExit:
        pass  # Ctrl-C or SIGTERM: the figures so far
    finally:
        tempfile.tempdir = before
    return watch


def _train(rollouts: int, folder: Path, callbacks: list[Callback], per_rollout: int) -> None:
    fit(
        tiny_module(minibatches_per_rollout=2, max_staleness=1, patience=None, optimizer=partial(AdamW, lr=RATE)),
        callbacks=callbacks,
        data=tiny_prompts(400, per_rollout, validation=[[2, 3], [5]]),
        max_epochs=-1,
        max_steps=2 * rollouts,
        enable_checkpointing=True,
        logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=20),
        val_check_interval=100,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        log_every_n_steps=2,
    )


def growth(watch: Watch) -> dict[str, float]:
    """Return the growth after the warm-up."""
    last = watch.looks[-1].rollout
    looks = [look for look in watch.looks if look.rollout >= WARM_UP * last]
    at = np.array([look.rollout for look in looks]) / 100
    slope = float(np.polyfit(at, [look.memory for look in looks], 1)[0])
    half = len(looks) // 2

    def more(name: str) -> float:
        early, late = ([getattr(look, name) for look in part] for part in (looks[:half], looks[half:]))
        return max(late) - max(early)

    counts = {name: more(name) for name in ("descriptors", "threads", "processes", "files")}
    seconds = watch.seconds[int(WARM_UP * len(watch.seconds)) :]
    quarter = max(len(seconds) // 4, 1)
    slower = median(seconds[-quarter:]) / median(seconds[:quarter])
    return {"memory": slope, **counts, "slower": slower, "seconds": median(seconds)}


def report(watch: Watch) -> int:
    """Prints the figures; the exit code."""
    grown, first, last = growth(watch), watch.looks[0], watch.looks[-1]
    bounds = {"memory": MAX_SLOPE, "slower": MAX_SLOWER}
    say = sys.stdout.write
    say(f"{len(watch.seconds)} rollouts, {grown['seconds'] * 1000:.0f} ms of the processor each (median)\n")
    say(f"memory {first.memory:.0f} -> {last.memory:.0f} MiB, {grown['memory']:+.2f} MiB per 100 rollouts\n")
    for name in ("descriptors", "threads", "processes", "files"):
        say(f"{name} {getattr(first, name)} -> {getattr(last, name)}, {grown[name]:+.0f} in the second half\n")
    say(f"step time x {grown['slower']:.2f} from the first quarter to the last\n")
    worse = [name for name, value in grown.items() if name != "seconds" and value > bounds.get(name, 0)]
    say(f"grows: {', '.join(worse) or 'nothing'}\n")
    return int(bool(worse))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # the table of the ledger
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nothing:
        shown, sys.stdout = sys.stdout, nothing  # the table of samples
        try:
            watch = soak(options.rollouts, Path(folder))
        finally:
            sys.stdout = shown
    return report(watch)


if __name__ == "__main__":
    sys.exit(main())
