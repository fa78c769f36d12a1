"""Sample table: samples with their rewards, in the terminal and in the loggers."""

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.data import StepIndex
from lightning_rl.module import RLLightningModule
from lightning_rl.reporting.loggers import log_samples
from lightning_rl.rollout import FinishReason, Rollout, spans_of
from lightning_rl.utils.arguments import check_counts
from lightning_rl.utils.terminal import visible
from lightning_rl.utils.trainer import show_line

TEXTS = ("prompt", "response")


class SampleTable(RLCallback):
    """Shows samples of the rollouts 0, n, 2n, ...: the best and the worst of some groups.

    Rank 0 prints them above the progress bar and logs a table to every logger that supports tables: TensorBoard, W&B,
    MLflow and Comet; else it appends lines to ``samples.jsonl`` beside the run. The signal does not change. Control
    characters in model output are shown as text in a terminal.

    Args:
        every_n_rollouts: Interval n.
        rows: Number of samples in a table.
        width: Maximum number of characters of a prompt or response in the terminal; the middle is left out. Loggers get
            the full text.

    Raises:
        ValueError: If a number is below 1, or ``width`` below 16.
    """

    name = "sample_table"

    def __init__(self, every_n_rollouts: int = 10, *, rows: int = 4, width: int = 240) -> None:
        check_counts(1, every_n_rollouts=every_n_rollouts, rows=rows)
        check_counts(16, width=width)
        self.every_n_rollouts, self.rows, self.width = every_n_rollouts, rows, width
        self._module: RLLightningModule | None = None
        self._step_index: StepIndex | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        due = batch.step == 0 and batch.rollout % self.every_n_rollouts == 0 and trainer.is_global_zero
        self._module, self._step_index = cast(RLLightningModule, pl_module), batch if due else None

    @override
    def observe(self, rollout: Rollout) -> None:
        if self._step_index is None or self._module is None or not len(rollout):
            return
        step_index, module = self._step_index, self._module
        trainer = module.trainer
        samples = [_sample(rollout, row, module) for row in choose_rows(rollout, self.rows)]
        show_line(trainer, format_table(f"Samples of rollout {step_index.rollout}", samples, self.width))
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        log_samples(trainer.loggers, samples, step_index, folder)


def choose_rows(rollout: Rollout, number: int) -> list[int]:
    """Return the best and worst sample of each group in turn, until there are enough; no reward ranks last."""
    rewards = torch.where(rollout.rewarded, rollout.rewards, -math.inf)
    chosen: list[int] = []
    for group in dict.fromkeys(rollout.groups.tolist()):
        rows = (rollout.groups == group).nonzero()[:, 0]
        ranked = rows[rewards[rows].argsort(descending=True, stable=True)].tolist()
        chosen += ranked[:1] + ranked[1:][-1:]
        if len(chosen) >= number:
            break
    return chosen[:number]


def _sample(rollout: Rollout, row: int, module: RLLightningModule) -> dict[str, Any]:
    def text(ids: Tensor, length: Tensor) -> str:
        known = ids[: int(length)].tolist()
        return str(known if module.options.tokenizer is None else module.options.tokenizer.decode(known))

    figures = {name: float(values[row]) for name, values in rollout.rewards_by_function.items()}
    rewards = {"task": float(rollout.rewards[row]) if rollout.rewarded[row] else math.nan, **figures}
    return {
        "sample": int(rollout.sample_ids[row]),
        "group": int(rollout.groups[row]),
        **{f"reward/{name}": None if math.isnan(value) else value for name, value in rewards.items()},
        "finish": FinishReason(int(rollout.finish[row])).name.lower(),
        "tokens": int(rollout.sampled_lengths[row]),
        "prompt": text(rollout.prompt_ids[row], rollout.prompt_lengths[row]),
        "response": "".join(
            part if drawn else f"[{part}]"  # text of an environment
            for drawn, ids in spans_of(rollout, row)
            for part in [text(torch.tensor(ids), torch.tensor(len(ids)))]
        ),
    }


def format_table(title: str, samples: Sequence[dict[str, Any]], width: int) -> str:
    """Return samples one below the other, for a terminal."""
    rewards = [key for key in samples[0] if key.startswith("reward/") and key != "reward/task"]
    if len(rewards) == 1 and all(sample[rewards[0]] == sample["reward/task"] for sample in samples):
        samples = [{key: value for key, value in sample.items() if key != rewards[0]} for sample in samples]
    cells = [{_head(key): _cell(value, width) for key, value in sample.items()} for sample in samples]
    return "\n".join([title, *map(_block, cells)])


def _head(key: str) -> str:
    return "reward" if key == "reward/task" else key.removeprefix("reward/")


def _block(cells: dict[str, str]) -> str:
    """Return the numbers of a sample in one line, and its texts below."""
    texts = [f"  {head:<8}  {indent(cells[head], ' ' * 12).lstrip()}" for head in TEXTS if head in cells]
    return "\n".join(["  ".join(f"{head} {value}" for head, value in cells.items() if head not in TEXTS), *texts])


def _cell(value: Any, width: int) -> str:
    """Return a value for the terminal, with visible control characters and shortened."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = visible(str(value))
    half = (width - 5) // 2
    return text if len(text) <= width else f"{text[:half]} ... {text[-half:]}"
