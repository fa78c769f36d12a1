"""Habits of Lightning: hooks, files, rows and counters are those of a plain module under manual optimization."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import a_trainer, tiny_module, tiny_prompts
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from typing_extensions import override

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:.*which should rise, with Lightning"),
]

STEPS, ROLLOUTS, QUESTIONS = 2, 3, 3  # optimizer steps per rollout; rollouts and batches of validation per epoch
SCORES = [3.0, 5.0, 4.0, 4.0, 2.0, 6.0, 1.0, 7.0, 0.0]  # mean rewards, by the call of a stage
HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
METRICS = "reward/task", "val/reward/task", "test/reward/task"
Fit = Callable[..., Trainer]


class Recorder(Callback):
    """Keeps every hook with the counters of the Trainer."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self.events = events

    def note(self, hook: str, trainer: Trainer, *arguments: Any, **keywords: Any) -> None:
        """Add an event; the numbers among the arguments are the index of a batch and that of its loader."""
        numbers = [each for each in (*arguments, *keywords.values()) if isinstance(each, int | str)]
        self.events.append((hook, trainer.global_step, trainer.current_epoch, trainer.sanity_checking, *numbers))


for hook in HOOKS:
    setattr(Recorder, hook, lambda self, *arguments, hook=hook, **keywords: self.note(hook, *arguments, **keywords))


class Axes(DummyLogger):
    """Keeps the step of each row, with the metrics that both modules log."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name in metrics:
            if name in METRICS or name.startswith("lr-AdamW"):
                value = None if name == "reward/task" else round(float(metrics[name]), 6)  # a mean since the last row
                self.rows.append((name.partition("/policy")[0], step, value))


class Plain(LightningModule):
    """One optimizer step per ``training_step``, with the metrics of the library's module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(2, 2)
        self.calls = {"reward/task": 0, "val/reward/task": 0, "test/reward/task": 0}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(torch.ones(2)).sum())
        optimizer.step()
        self.log("reward/task", SCORES[self.calls["reward/task"] // STEPS % len(SCORES)])
        self.calls["reward/task"] += 1
        return {}

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        stage = "test" if self.trainer.testing else "val"
        name = f"{stage}/reward/task"
        self.log(name, SCORES[self.calls[name] % len(SCORES)])
        self.calls[name] += batch_idx == self.batches(stage) - 1

    def batches(self, stage: str) -> Any:
        """Return the number of batches of an evaluation."""
        trainer: Any = self.trainer
        return (
            trainer.num_sanity_val_batches if trainer.sanity_checking else getattr(trainer, f"num_{stage}_batches")
        )[0]

    test_step = validation_step

    @override
    def predict_step(self, batch: Tensor, batch_idx: int) -> list[float]:
        return batch.tolist()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Batches:
    """Numbers of batches; the position is part of checkpoints, as that of the library's loader."""

    def __init__(self, number: int) -> None:
        self.number, self.place = number, 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.number

    def __iter__(self) -> Iterator[Tensor]:
        """Yield an epoch of batches."""
        for _ in range(self.number):
            self.place += 1
            yield torch.tensor([self.place - 1])

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position."""
        self.place = state["place"]


class PlainData(LightningDataModule):
    """As many batches as the prompts of :class:`Side` have."""

    @override
    def train_dataloader(self) -> Any:
        return Batches(STEPS * ROLLOUTS)

    @override
    def val_dataloader(self) -> Any:
        return Batches(QUESTIONS)

    test_dataloader = val_dataloader

    @override
    def predict_dataloader(self) -> Any:
        return Batches(2 * ROLLOUTS)


class Scores:
    """Reward of which the mean of each stage is the next one of :data:`SCORES`."""

    def __init__(self) -> None:
        self.module: Any = None
        self.calls = {"train": 0, "val": 0, "test": 0}

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Return a reward for each completion."""
        trainer = self.module.trainer
        stage = "test" if trainer.testing else "val" if trainer.validating or trainer.sanity_checking else "train"
        score = SCORES[self.calls[stage] % len(SCORES)]
        self.calls[stage] += stage == "train" or trainer._active_loop.batch_progress.is_last_batch  # noqa: SLF001
        return [score + (0.5 if place % 2 else -0.5) * (stage == "train") for place in range(len(completions))]


class Side:
    """Runs of one of the two modules, and the traces of its Trainers."""

    def __init__(self, folder: Path, *, plain: bool) -> None:
        self.folder, self.plain = folder, plain
        self.events: list[tuple[Any, ...]] = []
        self.rows: list[Any] = []
        self.noted: list[Any] = []
        self.fresh()

    def fresh(self) -> None:
        """Make a new module and its data, as a new process does."""
        scores = Scores()
        self.module: Any = (
            Plain()
            if self.plain
            else tiny_module(
                rewards={"score": scores},
                group_size=2,
                minibatches_per_rollout=STEPS,
                max_new_tokens=1,
                patience=99,
            )
        )
        scores.module = self.module
        questions = {"validation": [[2], [3], [4]], "validation_batch_size": 1}
        self.data: Any = PlainData() if self.plain else tiny_prompts(2 * ROLLOUTS, 2, **questions)

    def trainer(self, *callbacks: Callback, **options: Any) -> Trainer:
        """Make a Trainer that is traced."""
        options = {"logger": Axes(self.rows), "num_sanity_val_steps": 0, "default_root_dir": self.folder, **options}
        return a_trainer([Recorder(self.events), *callbacks], **options)

    def fit(self, *callbacks: Callback, ckpt: str | None = None, **options: Any) -> Trainer:
        """Fit with a new Trainer, and keep its counters."""
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(self.module, self.data, ckpt_path=None if ckpt is None else self.folder / ckpt)
        self.noted.append((trainer.global_step, trainer.current_epoch, str(trainer.state.status), trainer.should_stop))
        return trainer

    def saves(self, **options: Any) -> ModelCheckpoint:
        """Make a ModelCheckpoint in the folder of this side."""
        return ModelCheckpoint(**dict[str, Any](dirpath=self.folder / "saved") | options)

    def trace(self) -> dict[str, Any]:
        """Return all that can be compared."""
        files = {str(path.relative_to(self.folder)): self.content(path) for path in sorted(self.folder.rglob("*.ckpt"))}
        return {"noted": self.noted, "events": self.events, "rows": self.rows, "files": files}

    def content(self, path: Path) -> dict[str, Any]:
        """Return the counters of a checkpoint, and the states of Lightning's callbacks."""
        checkpoint = torch.load(path, weights_only=True)
        loops = checkpoint["loops"]
        loops["fit_loop"].pop("state_dict")
        states = {
            key: state for key, state in checkpoint.get("callbacks", {}).items() if key.startswith(("ModelC", "EarlyS"))
        }
        return {
            "epoch": checkpoint["epoch"],
            "step": checkpoint["global_step"],
            "loops": loops,
            "states": self.plainly(states),
        }

    def plainly(self, value: Any) -> Any:
        """Return a state with numbers for tensors and relative paths."""
        if isinstance(value, dict):
            return {self.plainly(key): self.plainly(each) for key, each in value.items()}
        if isinstance(value, Tensor):
            return round(float(value), 6)
        return value.replace(str(self.folder), "") if isinstance(value, str) else value


def compare(case: Callable[[Side], object], folder: Path) -> Side:
    """Run a case with both modules; all that they leave is equal."""
    sides = [Side(folder / name, plain=name == "plain") for name in ("plain", "library")]
    for side in sides:
        side.folder.mkdir()
        case(side)
    plain, library = (side.trace() for side in sides)
    for part in plain:
        assert library[part] == plain[part], part
    return sides[1]


def fitting(**options: Any) -> Callable[[Side], object]:
    """A case of one fit with options of the Trainer."""
    return lambda side: side.fit(**options)


def saving(fit: dict[str, Any] | None = None, **options: Any) -> Callable[[Side], object]:
    """A case of one fit of two epochs with a ModelCheckpoint."""
    given: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, **(fit or {})}
    return lambda side: side.fit(side.saves(**options), **given)


def stopping(fit: dict[str, Any] | None = None, **options: Any) -> Callable[[Side], object]:
    """A case of one fit with an EarlyStopping."""
    return lambda side: side.fit(EarlyStopping(**options), **dict[str, Any](max_epochs=6) | (fit or {}))


TRAINER: dict[str, dict[str, Any]] = {
    "one epoch": {},
    "three epochs": {"max_epochs": 3},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "max_steps over epochs": {"max_steps": 9, "max_epochs": -1},
    "min_steps": {"min_steps": 8, "max_epochs": 2},
    "min_epochs": {"min_epochs": 2, "max_epochs": 3},
    "max_time": {"max_time": "00:01:00:00", "max_epochs": 2},
    "max_time that is over": {"max_time": "00:00:00:00", "max_epochs": 2},
    "max_epochs=0": {"max_epochs": 0},
    "max_steps=0": {"max_steps": 0},
    "limit_train_batches": {"limit_train_batches": 4, "max_epochs": 2},
    "limit_train_batches within a rollout": {"limit_train_batches": 3, "max_epochs": 2},
    "limit_train_batches as a share": {"limit_train_batches": 0.5, "max_epochs": 2},
    "limit_val_batches": {"limit_val_batches": 2},
    "limit_val_batches=0": {"limit_val_batches": 0},
    "limit_val_batches as a share": {"limit_val_batches": 0.4},
    "val_check_interval": {"val_check_interval": 2, "max_epochs": 2},
    "val_check_interval within a rollout": {"val_check_interval": 3},
    "val_check_interval as a share": {"val_check_interval": 0.5},
    "val_check_interval over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "num_sanity_val_steps=-1": {"num_sanity_val_steps": -1, "max_epochs": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 3},
    "overfit_batches as a share": {"overfit_batches": 0.5, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run=3": {"fast_dev_run": 3},
    "log_every_n_steps": {"log_every_n_steps": 2, "max_epochs": 2},
    "log_every_n_steps over epochs": {"log_every_n_steps": 4, "max_epochs": 2},
    "log_every_n_steps=0": {"log_every_n_steps": 0},
    "profiler": {"profiler": "simple"},
    "enable_checkpointing": {"enable_checkpointing": True, "max_epochs": 2},
    "barebones": {"barebones": True, "logger": None, "num_sanity_val_steps": None, "log_every_n_steps": None,
                  "enable_progress_bar": None, "enable_model_summary": None, "enable_checkpointing": None},
    "no inference mode": {"inference_mode": False, "num_sanity_val_steps": 1},
    "detect_anomaly": {"detect_anomaly": True},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "reload_dataloaders_every_n_epochs within a rollout": {
        "reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3, "max_epochs": 3},
    "deterministic": {"deterministic": True},
    "bf16": {"precision": "bf16-mixed"},
}  # fmt: skip


@pytest.mark.parametrize("options", TRAINER.values(), ids=TRAINER.keys())
def test_an_option_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    compare(fitting(**options), tmp_path)


CHECKPOINTS: dict[str, Callable[[Side], object]] = {
    "by default": saving(),
    "every_n_train_steps": saving(every_n_train_steps=2, save_top_k=-1),
    "every_n_train_steps within a rollout": saving(every_n_train_steps=5, save_top_k=-1),
    "every_n_epochs": saving({"max_epochs": 3}, every_n_epochs=2, save_top_k=-1),
    "save_last": saving(save_last=True, every_n_train_steps=3),
    "save_last as a link": saving(save_last="link", every_n_epochs=1),
    "save_on_train_epoch_end": saving(save_on_train_epoch_end=True, save_top_k=-1),
    "save_top_k of the validation": saving(
        {"val_check_interval": 2}, monitor="val/reward/task", mode="max", save_top_k=2, save_on_train_epoch_end=False),
    "save_top_k at the end of an epoch": saving({"max_epochs": 3}, monitor="val/reward/task", mode="max", save_top_k=2),
    "monitor of the training": saving(monitor="reward/task", mode="max", every_n_train_steps=2, save_top_k=2),
    "monitor of the step": saving(monitor="step", mode="max", every_n_train_steps=2, save_top_k=2),
    "filename": saving(filename="{epoch}-{step}", every_n_train_steps=3, save_top_k=-1),
    "filename of a metric": saving(
        filename="{step}-{val/reward/task:.2f}", auto_insert_metric_name=False, monitor="val/reward/task",
        mode="max"),
    "save_weights_only": saving(save_weights_only=True, every_n_train_steps=3),
    "save_top_k=0": saving(save_top_k=0),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_an_option_of_a_checkpoint(case: Callable[[Side], object], tmp_path: Path) -> None:
    compare(case, tmp_path)


ONE_ROLLOUT = {"limit_train_batches": STEPS}
STOPS: dict[str, Callable[[Side], object]] = {
    "on the validation": stopping(monitor="val/reward/task", patience=1, mode="min"),
    "within an epoch": stopping({"val_check_interval": 2}, monitor="val/reward/task", patience=2, mode="max"),
    "on the training, an epoch a rollout": stopping(ONE_ROLLOUT, monitor="reward/task", patience=2, mode="max"),
    "at a threshold": stopping(monitor="val/reward/task", stopping_threshold=4.5, mode="max"),
    "not before min_epochs": stopping({"min_epochs": 4}, monitor="val/reward/task", patience=1, mode="min"),
    "not before min_steps": stopping({"min_steps": 20}, monitor="val/reward/task", patience=1, mode="min"),
    "at the end of a training epoch": stopping(
        monitor="val/reward/task", patience=1, mode="min", check_on_train_epoch_end=True),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPS.values(), ids=STOPS.keys())
def test_early_stopping(case: Callable[[Side], object], tmp_path: Path) -> None:
    compare(case, tmp_path)


def resumed(side: Side, ckpt: str, *, first: dict[str, Any], then: dict[str, Any], **options: Any) -> None:
    """Fit, and go on in a new process."""
    side.fit(side.saves(save_top_k=-1, **options), enable_checkpointing=True, **first)
    side.fresh()
    side.fit(side.saves(save_top_k=-1, **options), enable_checkpointing=True, ckpt=f"saved/{ckpt}", **then)


def stages(side: Side) -> None:
    """Evaluate before and after a fit."""
    trainer = side.fit()
    for stage in ("validate", "test", "validate"):
        side.noted.append(
            side.plainly(
                getattr(trainer, stage)(side.module, side.data, verbose=False)[0][
                    f"{stage.removesuffix('idate')}/reward/task"
                ]
            )
        )
    side.noted.append(len(trainer.predict(side.module, side.data) or []))


def stages_alone(side: Side) -> None:
    """Evaluate without a fit, with limits."""
    for stage in ("validate", "test", "predict"):
        trainer = side.trainer(limit_val_batches=2, limit_test_batches=1, limit_predict_batches=1)
        getattr(trainer, stage)(side.module, side.data)


def second_fit(side: Side) -> None:
    """Fit the same module and data with a new Trainer."""
    for number in "12":
        saves = side.saves(every_n_train_steps=2, save_top_k=-1, dirpath=side.folder / number)
        side.fit(saves, enable_checkpointing=True, limit_train_batches=3)


def second_fit_resumed(side: Side) -> None:
    """Resume the second fit of a module within a rollout, in a new process."""
    second_fit(side)
    side.fresh()
    saves = side.saves(every_n_train_steps=2, save_top_k=-1, dirpath=side.folder / "2")
    side.fit(saves, enable_checkpointing=True, ckpt="2/epoch=0-step=2.ckpt", max_epochs=2)


def same_trainer(side: Side) -> None:
    """Fit again with the same Trainer and more epochs."""
    trainer = side.fit()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(side.module, side.data)
    side.noted.append((trainer.global_step, trainer.current_epoch))


def best(side: Side) -> None:
    """Evaluate the best checkpoint and the last one."""
    saves = side.saves(monitor="val/reward/task", mode="max", save_last=True)
    trainer = side.fit(saves, enable_checkpointing=True, max_epochs=3)
    for path in ("best", "last"):
        trainer.validate(side.module, side.data, ckpt_path=path)
        trainer.test(side.module, side.data, ckpt_path=path)
        side.noted.append((trainer.global_step, trainer.current_epoch, side.plainly(trainer.ckpt_path)))


def by_hand(side: Side) -> None:
    """Save after a fit, and go on from this file."""
    side.fit(max_steps=3).save_checkpoint(side.folder / "hand.ckpt")
    side.fresh()
    side.fit(max_epochs=2, ckpt="hand.ckpt")


def several_savers(side: Side) -> None:
    """Save by two rules and log to two loggers."""
    saves = [side.saves(every_n_train_steps=2), side.saves(monitor="val/reward/task", filename="b", mode="min")]
    side.fit(*saves, logger=[Axes(side.rows), Axes(side.rows)], enable_checkpointing=True, max_epochs=2)


def stop_from_a_callback(side: Side) -> None:
    """Stop after a step."""

    class Stop(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    side.fit(Stop(), max_epochs=2)


RUNS: dict[str, Callable[[Side], object]] = {
    "resume after a step": partial(resumed, ckpt="epoch=0-step=4.ckpt", first={}, then={}, every_n_train_steps=4),
    "resume within a rollout": partial(
        resumed, ckpt="epoch=0-step=3.ckpt", first={"max_epochs": 2}, then={"max_epochs": 2}, every_n_train_steps=3),
    "resume after the last step of an epoch": partial(
        resumed, ckpt="epoch=0-step=6.ckpt", first={}, then={"max_epochs": 2}, every_n_train_steps=6),
    "resume after an epoch": partial(
        resumed, ckpt="epoch=0-step=6.ckpt", first={}, then={"max_epochs": 2}, every_n_epochs=1),
    "resume after a validation": partial(
        resumed, ckpt="epoch=0-step=2.ckpt", first={"val_check_interval": 2}, then={"val_check_interval": 2},
        monitor="val/reward/task", mode="max", save_on_train_epoch_end=False),
    "resume with max_steps": partial(
        resumed, ckpt="epoch=0-step=3.ckpt", first={"max_steps": 3, "max_epochs": -1},
        then={"max_steps": 8, "max_epochs": -1}, every_n_train_steps=3),
    "stages after a fit": stages,
    "stages alone": stages_alone,
    "a second fit with a new Trainer": second_fit,
    "a resumed second fit": second_fit_resumed,
    "a second fit with the same Trainer": same_trainer,
    "the best checkpoint": best,
    "save_checkpoint": by_hand,
    "several callbacks and loggers": several_savers,
    "should_stop": stop_from_a_callback,
    "LearningRateMonitor": lambda side: side.fit(LearningRateMonitor("step"), max_epochs=2),
    "Timer": lambda side: side.fit(Timer("00:01:00:00", interval="step"), max_epochs=2),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS.keys())
def test_a_run_of_several_stages(case: Callable[[Side], object], tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accumulate_grad_batches": 2}, "expected Trainer without accumulate_grad_batches"),
        ({"gradient_clip_val": 0.5}, "expected Trainer without gradient_clip_val"),
        ({"callbacks": ModelCheckpoint(train_time_interval=timedelta(1))}, "train_time_interval"),
    ],
)
def test_an_option_without_an_effect_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    side, callbacks = Side(tmp_path, plain=False), [options.pop("callbacks")] if "callbacks" in options else []
    with pytest.raises(ValueError, match=reason):
        side.fit(*callbacks, enable_checkpointing=True, **options)
    assert not [event for event in side.events if event[0] == "on_train_start"]
