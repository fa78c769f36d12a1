"""A recipe is taken where it would train or evaluate, and nothing of it has begun then."""

import os
import sys
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
)
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_rl.cli.doctor.command import examine
from lightning_rl.cli.recipes import Recipe, load_recipe, run_until_fit, starts_itself
from lightning_rl.cli.resume_check import resume_check
from lightning_rl.reporting import RunReport, SampleTable
from lightning_rl.utils.inspection import StopRecipe
from lightning_rl.utils.trainer import callbacks_of

SCRIPT = """
import sys
from kit.support import tiny_module, tiny_prompts
from lightning.pytorch import Callback, Trainer

class Alarm(Callback):
    def on_exception(self, *_):
        raise SystemExit("it was taken for a failure")

trainer = Trainer(
    accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2], max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Alarm()],
)
trainer.{method}(tiny_module(), {data})
raise SystemExit("it went on")
"""


def script(folder: Path, method: str = "fit", data: str = "tiny_prompts()") -> Path:
    path = folder / "recipe.py"
    path.write_text(SCRIPT.format(method=method, data=data))
    return path


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_it_ends_before_anything_begins_and_keeps_what_it_was_given(method: str, tmp_path: Path) -> None:
    arguments, variables = list(sys.argv), dict(os.environ)
    recipe = load_recipe(script(tmp_path, method), ["1", "auto"])
    assert recipe.module.policy is None and recipe.data is recipe.trainer.datamodule  # pyrefly: ignore[missing-attribute]
    assert [type(callback).__name__ for callback in callbacks_of(recipe.trainer)] == ["Alarm"]
    assert (sys.argv, dict(os.environ)) == (arguments, variables)


def test_a_trainer_of_several_ranks_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or Lightning sets it
    recipe = load_recipe(script(tmp_path), ["2", "ddp"])
    assert recipe.trainer.world_size == 2 and starts_itself(recipe.trainer)
    assert recipe.trainer.strategy.launcher.procs == []  # pyrefly: ignore[missing-attribute]


def test_other_data_than_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected .*PromptDataModule\(\.\.\.\)\), got no data module"):
        load_recipe(script(tmp_path, data="[]"), ["1", "auto"])


class Writes(Callback):
    """Writes to the experiment of the logger."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logger: Any = trainer.logger
        logger.log_metrics({"mine": 1.0})
        logger.experiment.add_text("mine", "text")
        logger.save()


def test_an_inspection_writes_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callbacks: list[Callback] = [LearningRateMonitor(), DeviceStatsMonitor(), Timer()]
    callbacks += [
        EarlyStopping("reward/task", mode="max"),
        ModelCheckpoint(),
        RichProgressBar(),
        RunReport(1),
        SampleTable(1),
        Writes(),
    ]
    logger = CSVLogger(tmp_path, "runs")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=logger, callbacks=callbacks, default_root_dir=tmp_path
    )
    capfd.readouterr()
    findings = examine(Recipe(trainer, tiny_module(max_new_tokens=32), tiny_prompts()), prompts=2, limit=30.0)
    assert [finding.observed for finding in findings if finding.severity != "fact"] == []
    assert {"samples", "engine"} <= {finding.check for finding in findings}
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


WRITING = """
from kit.support import tiny_module, tiny_prompts
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

trainer = Trainer(
    accelerator="cpu", max_steps=3, logger=CSVLogger({folder!r}, "logs"), default_root_dir={folder!r},
    log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint({folder!r} + "/checkpoints", save_last=True, every_n_train_steps=1)],
)
trainer.fit(tiny_module(), tiny_prompts(8, 4))
"""


@pytest.mark.filterwarnings("ignore:.*pre-optimization state", "ignore:Checkpoint directory .* is not empty")
def test_a_resume_check_writes_nothing_into_the_folders_of_the_run(tmp_path: Path) -> None:
    path, folder = tmp_path / "recipe.py", tmp_path / "run"
    path.write_text(WRITING.format(folder=str(folder)))
    assert resume_check(path, [], steps=3) == 0
    assert not [*folder.rglob("*")]


def test_a_recipe_that_is_started_for_a_replay_writes_nothing_into_the_folders_of_the_run(tmp_path: Path) -> None:
    path, folder = tmp_path / "recipe.py", tmp_path / "run"
    path.write_text(WRITING.format(folder=str(folder)))

    class Stop(Callback):
        @override
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(Path(trainer.checkpoint_callbacks[0].dirpath) / "x.ckpt")  # pyrefly: ignore[missing-attribute]
            raise StopRecipe(pl_module)

    run_until_fit(load_recipe(path, []), Stop())
    assert not [*folder.rglob("*")]
