"""Samples in loggers: a table where the logger supports one, else a file beside the run.

Every function runs on rank 0 only, where a logger's experiment is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_rl.data import StepIndex
from lightning_rl.utils.terminal import dump_visible, visible

FILE = "samples.jsonl"
TABLE = "samples"
MARKUP = re.compile(r"[!-/:-@\[-`{-~]")  # punctuation that may be Markdown markup

Samples = Sequence[Mapping[str, Any]]
Holder = Callable[[Any, Samples, StepIndex], None]


def _tensorboard(logger: TensorBoardLogger, samples: Samples, step_index: StepIndex) -> None:
    logger.experiment.add_text(TABLE, markdown_table(samples), step_index.index)


def _wandb(logger: WandbLogger, samples: Samples, step_index: StepIndex) -> None:
    logger.log_table(TABLE, list(samples[0]), [list(sample.values()) for sample in samples], step=step_index.index)


def _mlflow(logger: MLFlowLogger, samples: Samples, step_index: StepIndex) -> None:
    del step_index
    table = {column: [sample[column] for sample in samples] for column in samples[0]}
    logger.experiment.log_table(str(logger.run_id), table, f"{TABLE}.json")  # appends to the file


def _comet(logger: CometLogger, samples: Samples, step_index: StepIndex) -> None:
    rows = [list(sample.values()) for sample in samples]
    logger.experiment.log_table(f"{TABLE}_{step_index.rollout:06d}.csv", rows, headers=list(samples[0]))


HOLDERS: Mapping[type[Logger], Holder] = {
    TensorBoardLogger: _tensorboard,
    WandbLogger: _wandb,
    MLFlowLogger: _mlflow,
    CometLogger: _comet,
}
"""Functions that log samples, by logger class; other loggers cannot hold samples."""
NEEDS: Mapping[type[Logger], str] = {MLFlowLogger: "pandas"}
"""Packages that a logger's tables need: mlflow depends on pandas, mlflow-skinny does not."""


def log_samples(loggers: Sequence[Logger], samples: Samples, step_index: StepIndex, folder: Path) -> None:
    """Log samples to every logger; without a logger that can hold them, append them to one file.

    Args:
        loggers: Loggers of the trainer.
        samples: At least one sample; all have the same keys.
        step_index: Step of the rollout.
        folder: Folder of ``samples.jsonl``.
    """
    rows = [{"rollout": step_index.rollout, **sample} for sample in samples]
    held = [(logger, hold) for logger in loggers if (hold := holder(logger)) is not None]
    for logger, hold in held:
        hold(logger, rows, step_index)
    if len(held) < len(loggers) or not loggers:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("a", encoding="utf-8") as lines:
            lines.writelines(dump_visible(row) + "\n" for row in rows)


def holder(logger: Logger) -> Holder | None:
    """Return the function that logs samples to a logger, or None."""
    kinds = (kind for kind in HOLDERS if isinstance(logger, kind))
    return next((HOLDERS[kind] for kind in kinds if kind not in NEEDS or find_spec(NEEDS[kind])), None)


def markdown_table(samples: Samples) -> str:
    r"""Return samples as a Markdown table with all text escaped.

    Example:
        >>> print(markdown_table([{"reward": 0.5, "response": "a|b\n<img>"}]))
        | reward | response |
        |---|---|
        | 0&#46;5 | a&#124;b<br>&#60;img&#62; |
    """
    lines = [samples[0].keys(), *(sample.values() for sample in samples)]
    rows = ["| " + " | ".join(_escape(value) for value in line) + " |" for line in lines]
    return "\n".join([rows[0], "|" + "---|" * len(samples[0]), *rows[1:]])


def _escape(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else visible(str(value))
    return "".join("<br>" if mark == "\n" else f"&#{ord(mark)};" if MARKUP.match(mark) else mark for mark in text)
