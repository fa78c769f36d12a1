"""LightningCLI with YAML: the documented file, on a tiny local model; every command, every kind of option."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.support import tiny_policy, tiny_tokenizer
from lightning.pytorch.cli import LightningCLI

from lightning_rl import ClippedSurrogate, PromptDataModule, RLLightningModule, SequenceSumNorm
from lightning_rl.advantages import ESTIMATORS
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.losses import LOSSES
from lightning_rl.rewards import NumberMatch
from lightning_rl.signal.reductions import REDUCTIONS
from lightning_rl.utils.trainer import callbacks_of

PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"
SMALL: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_progress_bar": False}
SMALL |= {"enable_model_summary": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files that the page names beside run.yaml, with a small model and few prompts."""
    text = PAGE.read_text()
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    (rewards,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def brevity" in block]
    tiny_policy().save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    config["trainer"] |= {**SMALL, "default_root_dir": str(tmp_path)}
    config["model"] |= {"policy": str(tmp_path / "policy"), "group_size": 4}
    config["model"]["sampling"]["max_new_tokens"] = 8
    config["data"]["prompts_per_rollout"] = 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "my_rewards.py").write_text(rewards)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a b c", "answer": "d"}\n' * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # lightning 2.6 with jsonargparse >= 4.49
    monkeypatch.setattr(sys, "argv", ["train.py"])  # arguments are given to LightningCLI itself
    commands = {name: options for name, options in LightningCLI.subcommands().items() if name in ("fit", "validate")}
    monkeypatch.setattr(LightningCLI, "subcommands", staticmethod(lambda: commands))  # each parser takes long
    return tmp_path


def run(*arguments: str) -> LightningCLI:
    return LightningCLI(RLLightningModule, PromptDataModule, args=list(arguments))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The configuration that a command prints."""
    with pytest.raises(SystemExit) as ended:
        run("fit", *arguments, "--print_config")
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_fit_trains_and_saves_its_configuration(folder: Path) -> None:
    cli = run("fit", "--config", "run.yaml")
    assert cli.trainer.global_step == 2
    assert isinstance(cli.model.algorithm.loss, ClippedSurrogate) and cli.model.algorithm.loss.clip_high == 0.28
    assert {NoEOSMask, ReferenceKL} <= {type(callback) for callback in callbacks_of(cli.trainer)}
    assert cli.model.options.rewards.weights == {"right": 1.0, "short": 0.1}
    log = Path(str(cli.trainer.log_dir))
    assert "reward/right" in (log / "metrics.csv").read_text().splitlines()[0].split(",")
    options = yaml.safe_load((log / "hparams.yaml").read_text())["module"]
    assert options["optimizer"]["partial"] == "torch.optim.adamw.AdamW"
    assert options["lr_scheduler"] == {
        "partial": "lightning_rl.optimizers.WarmupThenLinear", "args": [], "keywords": {"warmup": 10, "total": 500},
    }  # fmt: skip
    assert (folder / "runs").is_dir()


def test_a_saved_configuration_makes_the_same_run(folder: Path) -> None:
    first = run("fit", "--config", "run.yaml")
    saved = Path(str(first.trainer.log_dir)) / "config.yaml"
    quiet = ("--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false")
    again = run("fit", "--config", str(saved), *quiet)
    assert again.trainer.global_step == 2
    assert {key: str(value) for key, value in again.model.run.configuration["module"].items()} == {
        key: str(value) for key, value in first.model.run.configuration["module"].items()
    }


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_validate_and_a_checkpoint(folder: Path) -> None:
    fitted = run("fit", "--config", "run.yaml")
    fitted.trainer.save_checkpoint(folder / "whole.ckpt")
    quiet = ("--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false")
    cli = run("validate", "--config", "run.yaml", "--ckpt_path", "whole.ckpt", *quiet)
    assert set(cli.trainer.callback_metrics) >= {"val/reward/task", "val/reward/right", "val/length/mean"}


def test_print_config_shows_every_default_and_loads_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = printed(capsys)
    assert defaults["model"]["sampling"]["max_new_tokens"] == 256
    assert defaults["model"]["optimizer"] == "lightning_rl.optimizers.fused_adamw"
    config = printed(capsys, "--config", "run.yaml")
    assert config["model"]["policy"] == str(folder / "policy")
    assert config["model"]["rewards"] == {
        "right": "my_rewards.last_word_matches", "short": ["my_rewards.brevity", 0.1],
    }  # fmt: skip
    (folder / "again.yaml").write_text(yaml.safe_dump(config))
    assert printed(capsys, "--config", "again.yaml") == config


TRAIN = """
from lightning.pytorch.cli import LightningCLI
from lightning_rl import PromptDataModule, RLLightningModule

LightningCLI(RLLightningModule, PromptDataModule)
"""


def test_functions_by_name_are_printed_where_warnings_are_not_errors(folder: Path) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["model"]["environment"] = {"echo": "my_rewards.brevity"}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-W", "default", "-c", TRAIN, "fit", "--config", "run.yaml", "--print_config"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    shown, given = yaml.safe_load(ran.stdout)["model"], config["model"]
    assert {name: shown[name] for name in ("rewards", "environment")} == {
        "rewards": given["rewards"], "environment": given["environment"],
    }  # fmt: skip


@pytest.mark.nightly
def test_every_known_name_is_printed_as_a_file_that_is_read_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {}
    names = {"loss": list(LOSSES), "advantages": list(ESTIMATORS), "reduction": [*REDUCTIONS, "sequence_sum_norm"]}
    for number in range(max(map(len, names.values()))):
        chosen = {option: known[number % len(known)] for option, known in names.items()}
        arguments = [f"--model.{option}={name}" for option, name in chosen.items()]
        config = printed(capsys, "--config", "run.yaml", *arguments)
        assert {option: config["model"][option] for option in names} == chosen
    (folder / "again.yaml").write_text(yaml.safe_dump(config))
    assert printed(capsys, "--config", "again.yaml") == config


def test_a_reward_and_a_reduction_with_options_are_what_the_file_says(folder: Path) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    reward = {"class_path": "lightning_rl.rewards.NumberMatch", "init_args": {"strict": True}}
    reduction = {"class_path": "lightning_rl.SequenceSumNorm", "init_args": {"length": 8}}
    for rewards, weights in ((reward, {"NumberMatch": 1.0}), ({"right": [reward, 0.5]}, {"right": 0.5})):
        config["model"] |= {"rewards": rewards, "reduction": reduction}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        model = LightningCLI(RLLightningModule, PromptDataModule, args=["--config", "run.yaml"], run=False).model
        assert model.options.rewards.weights == weights and model.algorithm.reduction == SequenceSumNorm(8)
        assert list(model.options.rewards.by_name.values()) == [NumberMatch(strict=True)]


MODELS = """
from kit.support import tiny_policy, tiny_tokenizer


def policy():
    return tiny_policy()


def critic(seed=1):
    return tiny_policy(seed)


def tokenizer():
    return tiny_tokenizer()


def mean(valid_tokens, trained, groups, global_sum):
    return valid_tokens.double() / global_sum(valid_tokens.sum().double())


def loss(view):
    return -view.logprobs * view.advantages
"""


def test_functions_without_annotations_are_found_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    named = {"policy": "policy", "reference": "policy", "critic": "critic", "tokenizer": "tokenizer"}
    named |= {"reduction": "mean", "loss": "loss"}
    config["model"] |= {option: f"my_models.{name}" for option, name in named.items()}
    config["model"] |= {"advantages": "gae"}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    shown = printed(capsys, "--config", "run.yaml")["model"]
    assert {option: shown[option] for option in named} == {
        option: f"my_models.{name}" for option, name in named.items()
    }
    cli = run("fit", "--config", "run.yaml")
    assert cli.trainer.global_step == 2 and cli.model.options.tokenizer is not None
    assert {name: getattr(source, "__name__", source) for name, source in cli.model.models.sources.items()} == {
        "policy": "policy", "reference": "policy", "critic": "critic",
    }  # fmt: skip


KINDS: list[dict[str, Any]] = [
    {
        "policy": "kit.support.tiny_policy",
        "rewards": "my_rewards.brevity",
        "loss": {"class_path": "lightning_rl.DPPO", "init_args": {"low": 0.1}},
        "advantages": {"class_path": "lightning_rl.Normalized", "init_args": {"std": "batch"}},
        "reduction": {"length": 8},
        "critic": "shared",
        "environment": "kit.conversations.new_echo",
        "model": {"packing": False, "compile": "eager"},
        "tokenizer": "policy",
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.LinearLR"},
        "max_grad_norm": None,
    },
    {
        "policy": "Qwen/Qwen2.5-0.5B-Instruct",
        "loss": "gspo",
        "reduction": "lightning_rl.signal.reductions.sequence_mean",
        "critic": {"source": "shared", "loss": {"coef": 0.5, "clip": None, "huber": 1.0}},
        "rewards": {"functions": "my_rewards.brevity", "timeout": 9.0},
        "environment": ["my_rewards.brevity"],
    },
    {
        "policy": {"class_path": "kit.support.TinyPolicy", "init_args": {"seed": 3}},
        "critic": "kit.support.tiny_policy",
        "rewards": {"functions": {"short": ["my_rewards.brevity", 0.1]}, "max_failure_rate": 0.5},
        "environment": {"echo": "kit.conversations.new_echo"},
    },
    {
        "critic": {"source": "kit.support.tiny_policy"},
        "environment": {"source": "kit.conversations.new_echo", "max_turns": 4},
    },
    {
        "environment": {"source": {"echo": "kit.conversations.new_echo"}, "workers": 2},
    },
    {
        "environment": {"source": ["my_rewards.brevity"], "tool_parser": "hermes"},
    },
]


@pytest.mark.parametrize("options", KINDS)
def test_every_kind_of_option_is_read(
    options: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["model"] |= options
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    model = printed(capsys, "--config", "run.yaml")["model"]
    for option, value in options.items():
        shown = model[option]
        if isinstance(value, dict) and "class_path" in value:
            assert shown["class_path"] == value["class_path"]
            assert value.get("init_args", {}).items() <= shown["init_args"].items()
        else:
            assert shown == value or value.items() <= shown.items()


@pytest.mark.filterwarnings("ignore:`RLLightningModule.configure_optimizers` will be overridden")
def test_an_optimizer_of_the_command_line_itself_is_refused_with_its_place(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--model\.optimizer .* instead of --optimizer to LightningCLI"):
        run("fit", "--config", "run.yaml", "--optimizer", "AdamW")
