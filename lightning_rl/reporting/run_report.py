"""Run report: a report that is updated during the run and at its end."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_rl.configuration import configuration
from lightning_rl.corrections import RLCallback
from lightning_rl.data import StepIndex
from lightning_rl.module import RLLightningModule
from lightning_rl.recording import RolloutRecorder
from lightning_rl.recording.recording import stem_of
from lightning_rl.reporting.html_report import OWN_FOLDER, Pages, write_report
from lightning_rl.reporting.run_files import BEGIN, END, FINDINGS, METRICS, RUN, STEP
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.terminal import dump_visible
from lightning_rl.utils.trainer import callbacks_of

FILE = "report.html"


class RunReport(RolloutRecorder):
    """Writes ``report/report.html`` after each recorded rollout and at the end of the run.

    The report is one file that needs neither a server nor a network: curves, ledger, findings, configuration, and the
    recorded rollouts token by token (docs/inspecting.md). It does not change the signal. Its folder also holds the
    recordings (:class:`~lightning_rl.recording.RolloutRecorder`), metrics and findings from which ``lightning-rl
    report`` rebuilds it; a resumed run continues them. If an error ended the run, the report starts with it.

    Args:
        every_n_rollouts: Interval between recorded rollouts and reports.
        keep: Number of newest rollouts to keep; None for all.
        folder: Folder of the report; by default ``report`` in the folder of the logger.

    Raises:
        ValueError: If a number is below 1.
    """

    name = "run_report"

    def __init__(self, every_n_rollouts: int = 10, *, keep: int | None = 20, folder: str | Path | None = None) -> None:
        super().__init__(folder or OWN_FOLDER, every_n_rollouts, keep=keep)
        self._asked = None if folder is None else Path(folder)
        self._rows: _RowKeeper | None = None
        self._pages = Pages()
        self._begun, self._reported = False, 0
        self._rollout, self._step = 0, 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        logged = Path(trainer.log_dir or trainer.default_root_dir)  # a collective
        self.folder = self._asked or logged / OWN_FOLDER

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun, self._reported, self.written = False, 0, []
        if trainer.is_global_zero:
            self._rows = _RowKeeper(self.folder, trainer.default_root_dir)
            trainer.loggers.append(self._rows)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StepIndex, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._rollout, self._step = batch.rollout, cast(RLLightningModule, pl_module).run.progress.axis(batch.index)
        if not self._begun:
            self._begin(trainer, cast(RLLightningModule, pl_module), batch)
        self._begun = True

    def _begin(self, trainer: Trainer, module: RLLightningModule, step_index: StepIndex) -> None:
        """Continue the files of an earlier run up to this point; later lines are replaced."""
        keeper = _RowKeeper(self.folder, trainer.default_root_dir)
        if trainer.is_global_zero:
            keeper.write(RUN, json.dumps(configuration(module.options, trainer), default=str))
            keeper.append(METRICS, {BEGIN: self._step})
        keeper.append(self._findings_file(trainer), {BEGIN: step_index.rollout})
        parallel = module.parallel
        for path in sorted(self.folder.glob("rollout-*.json")):
            digits = path.stem.removeprefix("rollout-")[:6]
            if not digits.isdecimal() or path.stem != stem_of(int(digits), parallel.rank, parallel.ranks):
                continue
            if int(digits) < step_index.rollout + (step_index.step > 0):
                self.written.append(path)
            else:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepIndex, batch_idx: int
    ) -> None:
        number = len(self.written)
        last = self.written[-1:]
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (len(self.written), self.written[-1:]) != (number, last):
            self._report(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier("report")  # wait for the recordings of all ranks
        self._report(trainer)
        self._leave(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._report(trainer, exception)
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self._rows in trainer.loggers:
            trainer.loggers.remove(self._rows)
        self._rows = None

    def _findings_file(self, trainer: Trainer) -> str:
        return FINDINGS + (f"-rank{trainer.global_rank}" if trainer.global_rank else "") + ".jsonl"

    def _report(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        """Write new findings, and on rank 0 the end of the run and the report; a full disk does not end the run."""
        keeper = _RowKeeper(self.folder, trainer.default_root_dir)
        try:
            corrections = [callback for callback in callbacks_of(trainer) if isinstance(callback, RLCallback)]
            findings = [finding for callback in corrections for finding in callback.findings]
            for finding in findings[self._reported :]:
                keeper.append(self._findings_file(trainer), {"rollout": self._rollout, **asdict(finding)})
            self._reported = len(findings)
            if self._rows is not None:
                if exception is not None and self._begun:
                    error = {"error": type(exception).__name__, "message": hide_secrets(str(exception))}
                    keeper.append(METRICS, {END: self._step, **error})
                write_report([self.folder], self.folder / FILE, pages=self._pages)
        except FileNotFoundError:
            return  # nothing was logged or recorded
        except OSError as failure:
            text = f"expected to write the report to {self.folder}, got {failure}; the run continues"
            warnings.warn(text, stacklevel=2)


class _RowKeeper(DummyLogger):
    """Logger that writes the metrics of the run's loggers to a file."""

    def __init__(self, folder: Path, root: str) -> None:
        super().__init__()
        self._folder, self._root = folder, root

    @property
    @override
    def save_dir(self) -> str:
        """Default folder of a run without a logger, so that this logger changes no path."""
        return self._root

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        figures = {name: float(value) for name, value in metrics.items()}
        self.append(METRICS, {**figures, STEP: 0 if step is None else step})

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / name).open("a", encoding="utf-8") as lines:
            lines.write(dump_visible(line) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replace a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / name, lambda part: part.write_text(text, encoding="utf-8"))
