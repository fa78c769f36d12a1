"""The whole configuration of a run reaches hparams.yaml, every logger and the checkpoint, in plain values."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import SGD
from typing_extensions import override

import lightning_rl
from lightning_rl import DPPO, PromptDataModule, RLLightningModule, warmup_then_linear
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.configuration import configuration
from lightning_rl.recording import RolloutRecorder
from lightning_rl.reporting import RunReport, SampleTable
from lightning_rl.serialization import describe


def written(module: RLLightningModule, data: PromptDataModule | None = None, **options: Any) -> dict[str, Any]:
    """The configuration of a short fit."""
    return configuration(module.options, fit(module, data=data, limit_train_batches=1, **options))


def test_hparams_yaml_holds_everything(tmp_path: Path) -> None:
    module = tiny_module(loss=DPPO(low=0.1), lr_scheduler=warmup_then_linear(1, 4), seed=3)
    logger = CSVLogger(tmp_path)
    fit(module, callbacks=[NoEOSMask("drop_tokens"), LearningRateMonitor()], logger=logger, limit_train_batches=1)
    hparams = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert hparams["module"]["loss"]["init_args"]["low"] == 0.1
    assert hparams["module"]["lr_scheduler"]["keywords"] == {"warmup": 1, "total": 4}
    assert hparams["module"]["rewards"]["init_args"]["functions"] == {
        "parity_reward": [{"name": "kit.support.parity_reward"}, 1.0]
    }
    assert (hparams["module"]["seed"], hparams["module"]["sampling"]["init_args"]["max_new_tokens"]) == (3, 8)
    assert hparams["corrections"]["no_eos_mask"]["init_args"] == {"action": "drop_tokens"}
    names = [entry["class_path"].rpartition(".")[2] for entry in hparams["callbacks"]]
    assert names == ["StopOnZeroGradient", "LearningRateMonitor", "FaultTolerance"]
    assert hparams["callbacks"][0]["init_args"] == {"patience": 256}
    assert hparams["data"]["prompts"]["rows"] == 16 and hparams["data"]["prompts_per_rollout"] == 4
    assert hparams["trainer"]["precision"] == "32-true" and hparams["trainer"]["ranks"] == 1
    assert set(hparams["versions"]) == {"lightning_rl", "torch", "lightning", "transformers"}
    assert hparams["versions"]["lightning_rl"] == lightning_rl.__version__


class Listening(DummyLogger):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.params: list[Any] = []

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params.append(params)


def asking_reward(api_key: str, headers: dict[str, str]) -> Any:
    def ask(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        del completions, columns
        return [float(len(api_key) + len(headers) + place % 2) for place in range(len(prompts))]

    return ask


def test_no_file_of_a_run_holds_a_key(tmp_path: Path) -> None:
    reward = asking_reward("sesame-1", {"authorization": "sesame-1", "x-server": "http://me:sesame-1@127.0.0.1"})
    watching = [RunReport(1, folder=tmp_path / "report"), RolloutRecorder(tmp_path / "recorded"), SampleTable(1)]
    logger = CSVLogger(tmp_path)
    trainer = fit(
        tiny_module(rewards={"ask": reward}), callbacks=watching, logger=logger, limit_train_batches=1,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"hparams.yaml", "run.json", "whole.ckpt"} <= {path.name for path in files}
    assert [path for path in files if b"sesame-1" in path.read_bytes()] == []


def test_every_logger_gets_it() -> None:
    loggers, module = [Listening(), Listening()], tiny_module()
    trainer = fit(module, logger=loggers, limit_train_batches=1)
    assert [dict(logger.params[0]) for logger in loggers] == [configuration(module.options, trainer)] * 2


def test_a_checkpoint_holds_it_and_loads_without_pickles(tmp_path: Path) -> None:
    module = tiny_module(
        rewards={"closed": (lambda prompts, *_, **__: [float(len(tmp_path.name))] * len(prompts), 0.5)}
    )
    trainer = fit(module, limit_train_batches=1, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    saved = checkpoint["lightning_rl"]["configuration"]
    assert saved["module"]["rewards"]["init_args"]["functions"]["closed"][1] == 0.5
    assert saved == module.run.configuration


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"seed": 1}, "seed"), ({"group_size": 2}, "group_size"),
        ({"minibatches_per_rollout": 2}, "minibatches_per_rollout"),
        ({"loss": "reinforce"}, "loss"), ({"advantages": "rloo"}, "advantages"), ({"top_p": 0.9}, "sampling"),
        ({"optimizer": partial(SGD, lr=1e-2)}, "optimizer"),
        ({"lr_scheduler": warmup_then_linear(1, 5)}, "lr_scheduler"),
    ],
)  # fmt: skip
def test_a_difference_shows_where_it_is(options: dict[str, Any], place: str) -> None:
    usual, other = tiny_module().options, tiny_module(**options).options
    assert [name for name in usual if describe(usual[name]) != describe(other[name])] == [place]


def test_names_and_objects_are_one_configuration() -> None:
    named, made = tiny_module(loss="dppo", advantages="rloo"), tiny_module(loss=DPPO(), advantages=lightning_rl.RLOO())
    assert describe(named.options) == describe(made.options)


def test_other_rows_have_another_fingerprint() -> None:
    first, same = written(tiny_module())["data"], written(tiny_module())["data"]
    other = written(tiny_module(), tiny_prompts(15))["data"]
    assert first == same and first["prompts"]["fingerprint"] != other["prompts"]["fingerprint"]
    assert written(tiny_module(), tiny_prompts(validation=[[2, 3]]))["data"]["validation"]["rows"] == 1


def test_the_order_of_corrections_does_not_matter() -> None:
    some, same = [NoEOSMask(), ReferenceKL(as_loss=True)], [ReferenceKL(as_loss=True), NoEOSMask()]
    assert written(tiny_module(), callbacks=some) == written(tiny_module(), callbacks=same)
