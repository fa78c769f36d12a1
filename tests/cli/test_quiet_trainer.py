"""Inspections of recipes write and print nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.support import tiny_module, tiny_prompts
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_rl.cli.doctor.command import examine
from lightning_rl.cli.recipes import Recipe


class Writes(Callback):
    """Asks for the logger's class and folder, and writes to its experiment."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.logger, CSVLogger) and trainer.log_dir == trainer.logger.log_dir
        trainer.logger.log_metrics({"mine": 1.0})
        experiment: Any = trainer.logger.experiment
        experiment.add_text("mine", "text")
        trainer.logger.save()


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "LearningRateMonitor": LearningRateMonitor, "DeviceStatsMonitor": DeviceStatsMonitor, "Timer": Timer,
    "EarlyStopping": lambda: EarlyStopping("reward/task"), "ModelCheckpoint": ModelCheckpoint, "Writes": Writes,
    "RichProgressBar": RichProgressBar, "TQDMProgressBar": TQDMProgressBar,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACKS)
def test_the_doctor_refuses_none_of_them(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger(tmp_path, "runs")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=logger, callbacks=[CALLBACKS[name]()],
        default_root_dir=tmp_path,
    )  # fmt: skip
    capfd.readouterr()
    findings = examine(Recipe(trainer, tiny_module(max_new_tokens=32), tiny_prompts()), prompts=2, limit=30.0)
    assert [finding.observed for finding in findings if finding.severity != "fact"] == []
    assert {"samples", "engine"} <= {finding.check for finding in findings}
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""
