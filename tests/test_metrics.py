"""Metrics: merged statistics with fixed keys, and rows that reach every logger, checkpoint and early stopping whole."""

import csv
import inspect
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from typing_extensions import override

from lightning_rl import GAE, RLLightningModule, Stat, metrics
from lightning_rl.callbacks import OPSM, NoEOSMask, OffPolicyIS, ReferenceKL
from lightning_rl.metrics import LIGHTNINGS_DEFAULT, MetricLog, RunningStats

CORE = {
    "reward/task", "reward/parity_reward", "reward/shaped", "kl/ref", "kl/rollout", "kl/penalty", "optim/grad_norm",
    "optim/skipped", "policy/entropy", "policy/ratio_max", "policy/clip_fraction_low",
    "policy/clip_fraction_high", "length/mean", "length/truncated", "groups/zero_variance", "time/generate",
    "time/reward", "time/score", "time/signal", "time/sync", "time/update", "trainer/idle",
    "tokens_per_second", "staleness/mean", "staleness/max", "loss/total", "loss/policy",
}  # fmt: skip


class Keeping(DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Watched(Callback):
    """Record Lightning's metrics after each batch."""

    def __init__(self) -> None:
        self.known: list[dict[str, float]] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.known.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def population(values: Sequence[float]) -> Stat:
    return Stat.of(torch.tensor(values, dtype=torch.float64))


def logged(**options: Any) -> list[tuple[int | None, dict[str, float]]]:
    """The rows of a fit of four rollouts with two optimizer steps each."""
    logger = Keeping()
    fit(tiny_module(minibatches_per_rollout=2), **dict[str, Any](logger=logger) | options)
    return logger.rows


def test_populations_are_joined_however_they_are_split() -> None:
    whole, parts = RunningStats(), RunningStats()
    values = [1.0, 4.0, 2.0, 8.0]
    whole.update({"a": population(values), "b": population(values).std(), "c": population(values).maximum()})
    for part in (values[:1], values[1:1], values[1:]):
        parts.update({"a": population(part), "b": population(part).std(), "c": population(part).maximum()})
    assert parts.figures() == pytest.approx(whole.figures(), rel=1e-12)
    assert parts.figures() == pytest.approx({"a": 3.75, "b": float(torch.tensor(values).std()), "c": 8.0})


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        pytest.param(["a"], "b", id="gone"),
        pytest.param(["a", "b", "c"], "c", id="new"),
        pytest.param(["a", "c"], "b, c", id="another"),
    ],
)
def test_keys_may_not_change_and_the_difference_is_named(second: list[str], difference: str) -> None:
    running = RunningStats()
    running.update({"a": Stat.single(1.0), "b": Stat.single(1.0)})
    with pytest.raises(ValueError, match=f"the same metrics at every call, got a change of {difference}"):
        running.update({name: Stat.single(1.0) for name in second})


def test_a_row_of_rollouts_without_log_probabilities_of_the_engine_lacks_their_metric() -> None:
    log, both = MetricLog(), {"a": Stat.single(1.0), "kl/rollout": Stat.single(2.0)}
    for stats in (both, {"a": Stat.single(3.0)}, both):
        log.add("microbatch", stats)
        assert log.row().keys() == stats.keys()
    with pytest.raises(ValueError, match="the same metrics at every call, got a change of a, b"):
        log.add("microbatch", {"b": Stat.single(1.0)})


def test_a_value_stays_after_publishing_until_there_is_a_new_one() -> None:
    log = MetricLog()
    log.add("rollout", {"a": Stat.single(1.0)})
    log.add("step", {"b": Stat.single(2.0)})
    assert log.row() == {"a": 1.0, "b": 2.0}
    log.add("step", {"b": Stat.single(4.0)})
    assert log.row() == {"a": 1.0, "b": 4.0}, "a is still the latest; b has forgotten what was published"
    log.add("step", {"b": Stat.single(5.0)})
    log.add("step", {"b": Stat.single(7.0)})
    assert log.row() == {"a": 1.0, "b": 6.0}


def test_empty_populations_and_empty_contributions_are_left_out() -> None:
    log = MetricLog()
    log.add("step", {"none": population([]), "one": population([3.0])})
    log.add("rollout", {})
    assert log.row() == {"one": 3.0}


@pytest.mark.parametrize("published", [False, True])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(published: bool) -> None:
    log, again, file = MetricLog(), MetricLog(), io.BytesIO()
    log.add("step", {"a": population([1.0, 2.0]).std(), "b": population([5.0]).maximum()})
    if published:
        log.row()
    torch.save(log.state(), file)
    file.seek(0)
    again.load(torch.load(file, weights_only=True))
    for one in (log, again):
        one.add("step", {"a": population([7.0, 8.0]).std(), "b": population([3.0]).maximum()})
    assert again.row() == log.row()
    assert log.row()["b"] == (3.0 if published else 5.0)


def test_a_resumed_log_may_be_read_before_anything_new_comes_in() -> None:
    log, again = MetricLog(), MetricLog()
    log.add("rollout", {"a": Stat.single(2.0)})
    again.load(log.state())
    assert again.row() == {"a": 2.0}
    assert MetricLog().row() == {}


def test_a_state_is_a_copy() -> None:
    running = RunningStats()
    running.update({"a": Stat.single(2.0)})
    running.state()["moments"].zero_()
    assert running.figures() == {"a": 2.0}


def test_values_of_statistics() -> None:
    stats = {"mean": population([1.0, 3.0]), "max": population([1.0, 3.0]).maximum(), "none": population([])}
    assert MetricLog().values_of(stats) == {"mean": 2.0, "max": 3.0}


def test_every_metric_of_the_design_reaches_every_logger(tmp_path: Path) -> None:
    first, second, file = Keeping(), Keeping(), CSVLogger(tmp_path, name="", version="")
    module = tiny_module(minibatches_per_rollout=2, advantages=GAE(), critic="shared")
    fit(module, callbacks=[ReferenceKL(0.1)], logger=[first, file, second])
    assert first.rows == second.rows and len(first.rows) == 8
    assert [step for step, _ in first.rows] == list(range(8))
    for step, row in first.rows:
        first_rollout = {"trainer/idle"} if step is not None and step < 2 else set[str]()
        assert set(row) >= (CORE | {"loss/value", "value/error"}) - first_rollout
        assert all(math.isfinite(value) for value in row.values())
    with (tmp_path / "metrics.csv").open() as lines:
        written = list(csv.DictReader(lines))
    filled = [{name for name, cell in row.items() if cell} - {"step"} for row in written]
    assert filled == [set(row) for _, row in first.rows]


def test_corrections_log_under_their_names() -> None:
    logger = Keeping()
    module = tiny_module(minibatches_per_rollout=2, loss="reinforce")
    fit(module, callbacks=[OPSM(), NoEOSMask(), OffPolicyIS()], logger=logger)
    for _, row in logger.rows:
        assert {"opsm/rejected", "off_policy_is/weight_mean", "off_policy_is/ess"} <= set(row)
        assert any(name.startswith("no_eos_mask/") for name in row)


def test_rows_come_every_log_every_n_steps_and_hold_all_steps_since() -> None:
    every, third = logged(), logged(log_every_n_steps=3)
    assert [step for step, _ in every] == list(range(8)) and [step for step, _ in third] == [2, 5, 7]
    norms = [row["optim/grad_norm"] for _, row in every]
    for (_, row), steps in zip(third, (norms[0:3], norms[3:6], norms[6:8]), strict=True):
        assert row["optim/grad_norm"] == pytest.approx(sum(steps) / len(steps))
    assert logged(log_every_n_steps=0) == []


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_trainer_that_was_not_told_how_often_logs_every_rollout() -> None:
    assert inspect.signature(Trainer).parameters["log_every_n_steps"].default is None  # not distinguishable from 50
    assert Trainer(accelerator="cpu", logger=False).log_every_n_steps == LIGHTNINGS_DEFAULT  # pyrefly: ignore[missing-attribute]
    assert [step for step, _ in logged(log_every_n_steps=None)] == [1, 3, 5, 7]


@pytest.mark.usefixtures("notebook")
def test_the_bar_shows_how_training_goes() -> None:
    bar = TQDMProgressBar()
    trainer = fit(tiny_module(), callbacks=[bar], enable_progress_bar=True)
    shown = bar.get_metrics(trainer, cast(RLLightningModule, trainer.lightning_module))
    assert set(shown) == {"reward/task"}  # what a line has room for
    assert bar.train_progress_bar.desc == "Rollout 3 update  : "


@pytest.mark.usefixtures("notebook")
def test_a_rich_bar_shows_the_phase_as_well() -> None:
    class Phases(Callback):
        seen: ClassVar[list[str]] = []

        @override
        def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
            assert bar.progress is not None
            self.seen.append(bar.progress.tasks[0].description)

    bar = RichProgressBar()
    fit(tiny_module(), callbacks=[bar, Phases()], enable_progress_bar=True)
    assert Phases.seen == [f"Rollout {number} update  " for number in range(4)]


def test_the_last_rollout_stays_readable_in_every_row() -> None:
    rewards = [row["reward/task"] for _, row in logged()]
    assert rewards[0::2] == rewards[1::2] and len(set(rewards)) > 1


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
def test_a_checkpoint_may_monitor_the_reward(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="reward/task", mode="max", every_n_train_steps=1, filename="{step}")
    trainer = fit(tiny_module(), callbacks=[best], enable_checkpointing=True)
    assert trainer.global_step == 4 and best.best_model_score is not None
    assert Path(best.best_model_path).is_file() and 0 <= float(best.best_model_score) <= 1


@pytest.mark.parametrize("every", [1, 50], ids=["every-step", "fewer-steps-than-log_every_n_steps"])
def test_early_stopping_may_watch_any_metric(every: int) -> None:
    stopping = EarlyStopping("policy/entropy", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    trainer = fit(tiny_module(), callbacks=[stopping], max_epochs=5, log_every_n_steps=every)
    assert trainer.global_step == 2 and stopping.stopping_reason_message


def test_what_is_monitored_is_known_to_lightning_as_soon_as_it_is_measured() -> None:
    watched, logger = Watched(), Keeping()
    monitors = [
        EarlyStopping(name, mode="max", patience=100) for name in ("policy/entropy", "optim/grad_norm", "reward/shaped")
    ]
    fit(tiny_module(minibatches_per_rollout=2), callbacks=[watched, *monitors], logger=logger)
    for known, (_, row) in zip(watched.known, logger.rows, strict=True):
        assert set(known) >= {"policy/entropy", "optim/grad_norm", "reward/shaped", "reward/task"}
        assert known == pytest.approx({name: row[name] for name in known}, rel=1e-6)


def test_a_run_of_several_epochs_keeps_counting() -> None:
    rows = logged(max_epochs=3, data=tiny_prompts(8, 4))
    assert [step for step, _ in rows] == list(range(12))
    assert [row["rollout"] for _, row in rows] == list(itertools.chain.from_iterable([n, n] for n in range(6)))


def test_a_trainer_is_idle_for_the_share_of_time_in_which_it_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    times = metrics.PhaseTimes()

    def spend(phase: str, seconds: float) -> None:
        with times.phase(phase):
            now[0] += seconds

    spend("sync", 60.0)  # which builds vLLM
    spend("generate", 2.0)
    assert math.isnan(times.idle()["trainer/idle"].value())  # of the first rollout
    for phase, seconds in (("wait", 1.0), ("generate", 2.0), ("sync", 3.0), ("update", 4.0)):
        spend(phase, seconds)
    assert times.idle()["trainer/idle"].value() == pytest.approx(0.3)
    times.start(lambda _: None)  # of the next step: what was waited for stays counted since the last rollout
    spend("update", 1.0)
    spend("wait", 1.0)
    assert times.idle()["trainer/idle"].value() == pytest.approx(0.5)
