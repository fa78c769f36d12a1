"""Loggers, with their own packages and offline: figures, hyperparameters, and tables arrive where one looks.

`make test-loggers` has the packages; elsewhere these tests are skipped.
"""

import html
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from kit.metric_names import Names, noting_reward
from kit.support import fit, parity_reward, tiny_module, tiny_prompts, tiny_tokenizer
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_rl import Evaluation
from lightning_rl.data import StepIndex
from lightning_rl.reporting import SampleTable
from lightning_rl.reporting.loggers import FILE, holder, log_samples, markdown_table

pytestmark = pytest.mark.filterwarnings("default")  # what these packages warn of is theirs
SAMPLE: dict[str, Any] = {"reward/task": 0.5, "response": "a|b `c` **d**\n![e](f) <script>g</script> $h$"}


def train(logger: Logger | list[Logger]) -> None:
    """Rollouts 0, 1 and 2, of which the first and the last have a table of two samples."""
    module = tiny_module(tokenizer=tiny_tokenizer(), minibatches_per_rollout=2)
    fit(module, callbacks=[SampleTable(2, rows=2)], data=tiny_prompts(12, 4), logger=logger, log_every_n_steps=2)


def check_rows(columns: list[str], rows: list[list[Any]]) -> None:
    """The table holds what the policy said, with the reward of the very sample."""
    for row in rows:
        sample = dict(zip(columns, row, strict=True))
        assert len(sample["response"].split()) == int(sample["tokens"])
        assert float(sample["reward/task"]) == int(sample["tokens"]) % 2
    assert {int(row[columns.index("rollout")]) for row in rows} <= {0, 2}


def test_tensorboard_holds_them(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugin_util")
    logger = TensorBoardLogger(tmp_path)
    train(logger)
    events = reader.EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Scalars("reward/task")] == [1, 3, 5]
    (first, second) = events.Tensors("samples/text_summary")
    assert (first.step, second.step) == (0, 4)
    shown = plugin.markdown_to_safe_html(first.tensor_proto.string_val[0])
    assert shown.count("<tr>") == 3 and "<td>0</td>" in shown
    assert not (Path(logger.log_dir) / FILE).exists() and (Path(logger.log_dir) / "hparams.yaml").is_file()


def test_tensorboard_renders_nothing_that_a_model_wrote() -> None:
    plugin = pytest.importorskip("tensorboard.plugin_util")
    shown = plugin.markdown_to_safe_html(markdown_table([SAMPLE]))
    cell = shown.split("<td>")[-1].split("</td>")[0]
    assert re.findall(r"<[^>]*>", cell) == ["<br>"] and shown.count("<td>") == 2
    assert html.unescape(cell).replace("<br>", "\n") == SAMPLE["response"]


def test_wandb_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")  # or the logger would leave it behind
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    train(logger)
    run = logger.experiment
    assert run.summary["trainer/global_step"] == 5 and 0 <= run.summary["reward/task"] <= 1
    assert run.config["module"]["minibatches_per_rollout"] == 2
    files = Path(run.dir) / "media"
    wandb.finish()
    tables = [json.loads(file.read_text()) for file in sorted((files / "table").glob("samples_*.json"))]
    assert len(tables) == 2
    for table in tables:
        check_rows(table["columns"], table["data"])


def test_mlflow_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/runs.db", artifact_location=(tmp_path / "art").as_uri())
    train(logger)
    client, run = logger.experiment, str(logger.run_id)
    assert [entry.step for entry in client.get_metric_history(run, "reward/task")] == [1, 3, 5]
    assert client.get_run(run).data.params["module/minibatches_per_rollout"] == "2"
    table = client.load_table(str(logger.experiment_id), "samples.json", [run])
    assert table["rollout"].tolist() == [0, 0, 2, 2]
    check_rows(list(table), table.values.tolist())


def test_the_file_store_of_mlflow_holds_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # it is in maintenance mode
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logger, names = MLFlowLogger(tracking_uri=tmp_path.as_uri()), Names()
    rewards = {"parity": parity_reward, "noting": noting_reward}
    module = tiny_module(rewards=rewards, evaluation=Evaluation("sums", [[2], [3]], samples=2, rewards=rewards))
    fit(module, data=tiny_prompts(8, 4, validation=[[2, 3]]), logger=[logger, names])
    figures = logger.experiment.get_run(str(logger.run_id)).data.metrics
    assert figures.keys() == {name.replace("@", "") for name in names.seen}  # as Lightning does for MLflow
    assert figures["reward_metric/noting/share"] == 1.0 and figures["reward_failed/noting"] == 0.0


def test_comet_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")  # online=False disables the experiment (Lightning's issue 21617)
    logger = CometLogger(offline_directory=str(tmp_path))
    train(logger)
    logger.experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
        payloads = [message["payload"] for message in messages]
        uploads = [(payload["additional_params"] or {}) | payload for payload in payloads if "upload_type" in payload]
        tables = {each["fileName"]: opened.read(each["file_path"]).decode() for each in uploads if "fileName" in each}
    metrics = [payload["metric"] for payload in payloads if "metric" in payload]
    assert [entry["step"] for entry in metrics if entry["metricName"] == "reward/task"] == [1, 3, 5]
    assert {"samples_000000.csv", "samples_000002.csv"} <= set(tables)
    assert "reward/task" in tables["samples_000002.csv"].splitlines()[0]


def test_neptune_is_gone() -> None:
    from lightning.pytorch.loggers.neptune import NeptuneLogger

    with pytest.raises(RuntimeError, match="Neptune has been sunset"):
        NeptuneLogger()


def test_one_file_lies_beside_the_run_for_all_loggers_without_a_place(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="", version=""), CSVLogger(tmp_path / "other")]
    train([*loggers])
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["rollout"] for line in lines] == [0, 0, 2, 2]
    check_rows(list(lines[0]), [list(line.values()) for line in lines])


def test_without_a_logger_there_is_a_file(tmp_path: Path) -> None:
    log_samples([], [SAMPLE], StepIndex(3, 0, 6), tmp_path / "run")
    (line,) = (tmp_path / "run" / FILE).read_text().splitlines()
    assert json.loads(line) == {"rollout": 3, **SAMPLE}


def test_a_logger_without_the_package_that_makes_tables_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skinny(MLFlowLogger):
        def __init__(self) -> None:
            pass

    assert holder(Skinny()) is not None
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert holder(Skinny()) is None
