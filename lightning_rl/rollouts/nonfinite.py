"""Saving of the rollout whose non-finite gradient ended a run, with the rows to blame."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.update import StepGradient
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.trainer import log_folder

NONFINITE = "nonfinite"
SHOWN = 8  # rows that a message names


@contextmanager
def recording_nonfinite(trainer: Trainer, current: CurrentRollout, step: int, gradient: StepGradient) -> Iterator[None]:
    """Add file and rows of :func:`record_nonfinite` to a FloatingPointError that is raised in the context."""
    try:
        yield
    except FloatingPointError as stop:
        folder = log_folder(trainer) / NONFINITE
        where = record_nonfinite(folder, current, step, gradient, trainer.global_rank)
        raise FloatingPointError(f"{stop}; {where}") from stop


def record_nonfinite(folder: Path, current: CurrentRollout, step: int, gradient: StepGradient, rank: int) -> str:
    """Write a rollout to ``folder/rollout-N-rank-R.pt`` and name the rows to blame.

    Those are the rows of the step with a non-finite number; else those of microbatches with a non-finite loss; else all
    rows of the step.

    Args:
        folder: Folder to write to; created if missing.
        current: Rollout in progress.
        step: Number of the step within the rollout.
        gradient: Gradient of the step.
        rank: Rank of this process.

    Returns:
        Clause that names the file and the rows.
    """
    rows, why = _suspects(current, step, gradient)
    samples = current.rollout.sample_ids[torch.tensor(rows, dtype=torch.int64)].tolist()
    losses = [float(loss) for loss in gradient.losses]
    content: dict[str, Any] = {**current.state(), "step": step, "suspects": rows, "losses": losses}
    path, named = folder / f"rollout-{current.number}-rank-{rank}.pt", ", ".join(map(str, rows[:SHOWN]))
    rest = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    which = f"of rollout {current.number} rows {named}{rest} (samples {', '.join(map(str, samples[:SHOWN]))}) {why}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda part: torch.save(content, part))
    except (OSError, RuntimeError) as failure:
        return f"{which}; writing the rollout to {path} failed: {failure}"
    return f"{which}; the rollout is saved in {path}, for torch.load"


def _suspects(current: CurrentRollout, step: int, gradient: StepGradient) -> tuple[list[int], str]:
    microbatches, rollout = current.plan.step(step), current.rollout
    step_rows = sorted(current.plan.rows_of_step(step).tolist())
    nonfinite = [row for row in step_rows if row in set(_nonfinite_rows(rollout))]
    if nonfinite:
        return nonfinite, "hold a number that is not finite"
    pairs = zip(microbatches, gradient.losses, strict=False)
    lost = sorted({row for microbatch, loss in pairs if not torch.isfinite(loss) for row in microbatch.index.tolist()})
    if not lost:
        return step_rows, "were trained in this step"
    parts = [name for name, part in gradient.parts.items() if name != "loss/total" and not torch.isfinite(part)]
    return lost, f"have a loss that is not finite ({', '.join(parts) or 'a coefficient'})"


def _nonfinite_rows(rollout: Rollout) -> list[int]:
    bad = torch.zeros(len(rollout), dtype=torch.bool, device=rollout.response_ids.device)
    for spec, _, value in rollout.sanitize().entries():
        if isinstance(value, Tensor) and value.is_floating_point():
            wrong = value.isinf() if spec.sparse else ~value.isfinite()
            bad |= wrong[:, None].flatten(1).any(1)
    return bad.nonzero()[:, 0].tolist()
