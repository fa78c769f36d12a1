"""Metrics where Lightning's callbacks and users look for them, and monitors that cannot work."""

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.metric_names import Rows
from kit.support import fit, parity_reward, tiny_module, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from typing_extensions import override

from lightning_rl import Evaluation
from lightning_rl.callbacks import NoEOSMask

CHECKPOINTS: dict[str, Any] = {"enable_checkpointing": True}


class Looks(Callback):
    """Callback that keeps what Lightning's dictionaries hold after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], dict[str, float]]] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        both = trainer.callback_metrics, trainer.logged_metrics
        held, logged = ({name: float(value) for name, value in one.items()} for one in both)
        self.seen.append((held, logged))


def test_all_metrics_are_in_callback_metrics_after_each_step() -> None:
    looks, rows = Looks(), Rows()
    trainer = fit(tiny_module(minibatches_per_rollout=2), callbacks=[looks], logger=rows, log_every_n_steps=1)
    assert len(looks.seen) == len(rows.rows) == trainer.global_step and len(rows.rows[0]) > 20
    for (held, logged), row in zip(looks.seen, rows.rows, strict=True):
        assert held.items() >= row.items()
        assert held == logged
    assert {*trainer.callback_metrics} >= {*rows.rows[-1]} and "reward/task" in trainer.progress_bar_metrics


def test_without_a_logger_callbacks_find_every_metric() -> None:
    looks = Looks()
    fit(tiny_module(minibatches_per_rollout=2), callbacks=[looks], max_steps=3)
    assert all("optim/grad_norm" in held and "kl/old" in held for held, _ in looks.seen)


def falling() -> Any:
    """A reward that falls with each rollout."""
    calls: list[int] = []

    def falls(prompts: Any, completions: Any, **_: Any) -> list[float]:
        calls.append(len(prompts))
        return [float(place % 3 - len(calls)) for place in range(len(completions))]

    return {"falls": falls}


@pytest.mark.parametrize("steps", [1, 2])
def test_early_stopping_looks_after_each_rollout(steps: int) -> None:
    stop = EarlyStopping("reward/task", mode="max", patience=2)
    options = {"minibatches_per_rollout": steps, "rewards": falling()}
    trainer = fit(tiny_module(**options), data=tiny_prompts(64, 4), callbacks=[stop], max_steps=-1, max_epochs=1)
    assert trainer.global_step == 3 * steps


def test_early_stopping_counts_the_last_rollout_of_an_epoch_once() -> None:
    stop = EarlyStopping("reward/task", mode="max", patience=4)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 5, "callbacks": [stop]}
    trainer = fit(tiny_module(rewards=falling()), data=tiny_prompts(8, 4), **options)
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("reward/tasks", "'reward/task'"),
        ("reward/parity", "'reward/parity_reward'"),
        ("rewards/mean", "reward"),
        ("grad_norm", "'optim/grad_norm'"),
        ("train_loss", ": "),
        ("no_eos_msk/rejected", "'no_eos_mask/excluded'"),
        ("env/tool_calls", ": "),
        ("in_flight/tokens", ": "),
        ("value/error", ": "),
    ],
)
@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_monitor_that_no_metric_has_is_refused_at_setup(kind: Any, metric: str, nearest: str, tmp_path: Path) -> None:
    callback = kind(monitor=metric)
    with pytest.raises(ValueError, match=rf"{kind.__name__} to monitor .* got '{metric}'.*{re.escape(nearest)}"):
        fit(tiny_module(), callbacks=[callback, NoEOSMask()], default_root_dir=tmp_path, **CHECKPOINTS)


def test_a_metric_that_another_run_has_is_refused_after_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"got 'kl/ref', which nothing logs: monitor 'kl/.*'kl/old'"):
        fit(tiny_module(), callbacks=[EarlyStopping("kl/ref")])


def test_a_metric_of_an_evaluation_needs_one_and_its_name() -> None:
    with pytest.raises(ValueError, match="in a fit that evaluates nothing: pass validation="):
        fit(tiny_module(), callbacks=[EarlyStopping("val/reward/task")])
    module = tiny_module(evaluation=Evaluation("sums", [[1, 2], [3]]))
    with pytest.raises(ValueError, match="got 'val/sum/pass@1', which nothing logs: monitor 'val/sums/pass@1'"):
        fit(module, callbacks=[EarlyStopping("val/sum/pass@1")], num_sanity_val_steps=2)
    module = tiny_module(evaluation=Evaluation("sums", [[1, 2], [3]]))
    with pytest.raises(ValueError, match="got 'val/sums/pass@16', which nothing logs: monitor 'val/sums/pass@1'"):
        fit(module, callbacks=[EarlyStopping("val/sums/pass@16", mode="max")], num_sanity_val_steps=2)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"max_steps": 3, "check_val_every_n_epoch": 50}, 200), ({"max_steps": 3}, 4),
        ({"max_steps": 3, "val_check_interval": 9, "check_val_every_n_epoch": None}, 9),
        ({"max_steps": -1, "max_epochs": 3, "check_val_every_n_epoch": 4}, 16),
        ({"max_steps": 4}, 0), ({"max_steps": 3, "val_check_interval": 2}, 0), ({"max_steps": -1, "max_epochs": 1}, 0),
        ({"max_steps": 3, "val_check_interval": 3, "check_val_every_n_epoch": None}, 0),
    ],
)  # fmt: skip
def test_a_monitor_of_an_evaluation_that_a_fit_never_reaches_is_warned_of(options: dict[str, Any], first: int) -> None:
    data, stop = tiny_prompts(16, 4, validation=[[2], [3]]), EarlyStopping("val/reward/task", mode="max", strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(tiny_module(), data=data, callbacks=[stop], num_sanity_val_steps=0, **options)
    texts = [str(one.message) for one in caught if "expected a validation" in str(one.message)]
    assert ("val/reward/task" in trainer.callback_metrics) is not bool(first)
    assert [f"got the first one at step {first}: " in text for text in texts] == [True] * bool(first)


@pytest.mark.parametrize(
    "metric", ["val_loss", "val/a/avg@n", "val/reward/tasks", "policy/ratios", "no_eos_mask/reject"]
)
def test_the_metrics_of_the_message_are_logged(metric: str) -> None:
    def module() -> Any:
        return tiny_module(evaluation=Evaluation("a", [[1, 2], [3]], samples=2), minibatches_per_rollout=2)

    with pytest.raises(ValueError, match=f"got '{metric}'") as refused:
        fit(module(), callbacks=[EarlyStopping(metric), NoEOSMask()])
    trainer = fit(module(), callbacks=[NoEOSMask()])
    nearest = re.findall(r"'([^']+)'", str(refused.value).partition(": ")[2])
    assert nearest and metric not in nearest and {*nearest} <= {*trainer.callback_metrics}


@pytest.mark.parametrize(
    ("metric", "warns"),
    [
        ("reward/task", True),
        ("reward/parity_reward", True),
        ("val/a/pass@1", True),
        ("val/a/reward/task", True),
        ("reward/failed", False),
        ("kl/rollout", False),
        ("val/a/length/mean", False),
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_the_default_mode_for_a_metric_that_rises_gives_a_warning(
    kind: Any, mode: str, metric: str, warns: bool, tmp_path: Path
) -> None:
    module = tiny_module(evaluation=Evaluation("a", [[1, 2], [3]]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [kind(monitor=metric, mode=mode)]
        fit(module, callbacks=callbacks, default_root_dir=tmp_path, **CHECKPOINTS)
    texts = [str(one.message) for one in caught if 'pass mode="max"' in str(one.message)]
    assert len(texts) == (warns and mode == "min")


def test_metrics_that_a_callback_of_the_user_logs_can_be_monitored() -> None:
    class Logs(Callback):
        @override
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("mine/score", float(-batch_idx))

    stop = EarlyStopping("mine/score", mode="max", patience=2)
    trainer = fit(tiny_module(), callbacks=[Logs(), stop], data=tiny_prompts(64, 4), max_steps=-1, max_epochs=1)
    assert trainer.global_step == 4  # each value is looked at after the next step, before the callback logs again


def test_the_time_between_checkpoints_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=0))
    with pytest.raises(ValueError, match=r"without train_time_interval.*: pass every_n_train_steps="):
        fit(tiny_module(), callbacks=[saver], **CHECKPOINTS)


def test_which_weights_a_monitored_checkpoint_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    name = "{step}-{reward/task:.2f}"
    saver = ModelCheckpoint(
        tmp_path, name, monitor="reward/task", mode="max", save_top_k=1, auto_insert_metric_name=False
    )
    trainer = fit(tiny_module(), callbacks=[saver], default_root_dir=tmp_path, **CHECKPOINTS)
    assert "saves the weights after the update" in caplog.text and trainer.global_step
    assert re.search(r"-\d+\.\d\d\.ckpt$", saver.best_model_path)


@pytest.mark.parametrize("metric", ["reward/at_times", "reward_metric/at_times/length"])
def test_a_metric_without_values_in_the_first_rollout_can_be_monitored(metric: str) -> None:
    calls: list[int] = []

    def at_times(prompts: Any, completions: Any, log_metric: Any, **_: Any) -> list[float | None]:
        calls.append(len(prompts))
        if len(calls) == 1:
            return [None] * len(prompts)
        log_metric("length", 1.0)
        return [1.0] * len(prompts)

    trainer = fit(
        tiny_module(rewards={"parity": parity_reward, "at_times": at_times}),
        callbacks=[EarlyStopping(metric, mode="max", patience=9)],
        max_steps=3,
    )
    assert trainer.global_step == 3 and metric in trainer.callback_metrics
