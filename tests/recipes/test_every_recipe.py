"""Every recipe fits on a page, trains with ``--tiny``, and says in its configuration what it says in its script."""

import csv
import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import command_line
import pytest
import tiny
import tiny_gsm8k
import tiny_tools
import torch
import yaml
from kit.nodes import run_nodes
from lightning.pytorch.cli import LightningCLI

from lightning_rl import PromptDataModule, RLLightningModule
from lightning_rl.cli.recipes import load_recipe
from lightning_rl.configuration import configuration

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* groups are missing after"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]

ROOT = Path(__file__).resolve().parents[2]
RECIPES, CONFIGURATIONS = ROOT / "recipes", ROOT / "recipes" / "yaml"
ALL = sorted(path.stem for path in CONFIGURATIONS.glob("*.yaml"))
SIMPLE = ["cispo_servers", "dapo", "dr_grpo", "gspo_moe", "lora", "ppo", "reasoning"]
EXTRAS = {"reasoning": "reasoning_gym", "lora": "peft"}
MIXTURE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
MODELS = {f"Qwen/Qwen2.5-{size}-Instruct": "policy" for size in ("0.5B", "1.5B", "3B", "7B")} | {MIXTURE: "mixture"}

# What a configuration says by the name of a function, and a script by a class or with arguments.
NAMED_OTHERWISE = {"agent": ("environment", "policy")}

# What a configuration needs for one core without a network, beside a small model and its rows.
HERE = {"accelerator": "cpu", "precision": "32-true", "devices": 1, "num_nodes": 1, "strategy": "auto"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the recipes of this file run, so that each small model is made once."""
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(autouse=True)
def _there(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # lightning 2.6 with jsonargparse >= 4.49


def test_what_is_said_beside_tiny_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--rollouts", "9", "--tiny"])
    assert command_line.words_of(lambda: {"rollouts": 4}) == ["--rollouts=4", "--rollouts", "9"]
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--rollouts", "9"])
    assert command_line.words_of(lambda: {"rollouts": 4}) == ["--rollouts", "9"]


def skip_without_extra(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])


def numbers_of(name: str) -> dict[str, int | float]:
    """The options of a recipe that are numbers, with their defaults."""
    main = runpy.run_path(str(RECIPES / f"{name}.py"))["main"]
    defaults = {option: parameter.default for option, parameter in inspect.signature(main).parameters.items()}
    return {option: value for option, value in defaults.items() if type(value) in (int, float)}


@pytest.mark.parametrize("name", [*ALL, "quickstart"])
def test_a_number_that_makes_no_run_is_refused_by_its_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_extra(name)
    numbers = numbers_of(name)
    assert ("samples" if name == "evaluation" else "rollouts") in numbers
    for option, default in numbers.items():
        least = command_line.MINIMUM.get(option, 1)
        number = -1e-6 if isinstance(default, float) else least - 1
        with pytest.raises(SystemExit, match=rf"^expected --{option} (to be|>) .*, got {number}$"):
            run(name, f"--{option}={number}", monkeypatch=monkeypatch)


def test_tiny_runs_refuse_such_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^expected --rollouts to be a whole number above 0, got -1$"):
        run("dr_grpo", "--tiny", "--rollouts", "-1", monkeypatch=monkeypatch)  # Lightning's word for a run without end


def test_minus_one_stands_for_every_device_that_is_no_cpu() -> None:
    command_line.check({"accelerator": "gpu", "devices": -1})
    with pytest.raises(SystemExit, match=r"^expected --devices to be a whole number above 0, got -1$"):
        command_line.check({"accelerator": "cpu", "devices": -1})


def test_updates_that_do_not_divide_the_prompts_are_refused_before_the_warm_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    with pytest.raises(
        SystemExit, match=r"^expected updates of a rollout x devices to be one of 1, 2, 4, 8, 16, 32, got 3$"
    ):
        run("quickstart", "--updates", "3", monkeypatch=monkeypatch)
    assert "val/" not in capfd.readouterr().out


def run(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a recipe as ``python script arguments`` would."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    return runpy.run_path(str(RECIPES / f"{script}.py"), run_name="__main__")


def train(command: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``python train.py command --config file``, without the parsers of the other commands, which take a second."""
    commands = {command: LightningCLI.subcommands()[command]}
    monkeypatch.setattr(LightningCLI, "subcommands", staticmethod(lambda: commands))
    run("train", command, "--config", file, monkeypatch=monkeypatch)


def last_log(name: str) -> list[dict[str, str]]:
    """Return the logged rows of the newest run of a recipe."""
    folder = max((Path("runs") / name).iterdir(), key=lambda path: int(path.name.removeprefix("version_")))
    with (folder / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def run_log(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, str]]:
    """Return the logged rows of a recipe with ``--tiny``."""
    run(name, "--tiny", *options, monkeypatch=monkeypatch)
    return last_log(name)


def check_training(rows: list[dict[str, str]]) -> None:
    assert len(rows) >= tiny.SIZES["rollouts"]
    assert all(torch.isfinite(torch.tensor(float(row["optim/grad_norm"]))) for row in rows)


def small_configuration(name: str) -> dict[str, Any]:
    """The configuration of a recipe with a small model and few rows."""
    text = (CONFIGURATIONS / f"{name}.yaml").read_text()
    for split in ("train", "test"):
        text = text.replace(f"recipes/data/gsm8k/{split}.jsonl", str(tiny.rows_of(split)))
    for large, small in MODELS.items():
        text = text.replace(large, str(tiny.model(small))) if large in text else text
    config = yaml.safe_load(text)
    config["trainer"] |= HERE
    if config["data"]["prompts"] == "openai/gsm8k":
        config["data"] |= {"prompts": str(tiny.rows_of("train")), "name": None, "split": None}
        for evaluation in config["model"]["evaluation"]:
            options = {"source": str(tiny.rows_of("test")), "name": None, "split": None}
            evaluation["prompts"]["init_args"] |= options
    return config


def saved(config: dict[str, Any], name: str) -> str:
    """A file that holds a configuration."""
    Path(f"{name}.yaml").write_text(yaml.safe_dump(config))
    return f"{name}.yaml"


def test_every_recipe_is_a_script_of_at_most_80_lines_and_a_configuration() -> None:
    assert sorted([*SIMPLE, "agent", "distillation", "evaluation", "gsm8k", "tools", "two_nodes"]) == ALL
    lengths = {name: len((RECIPES / f"{name}.py").read_text().splitlines()) for name in ALL}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_the_table_of_recipes_has_every_recipe_once() -> None:
    lines = (ROOT / "docs" / "choosing.md").read_text().splitlines()
    tables = [line for line in lines if line.startswith("|") and "(../recipes/yaml/" in line]
    assert [name for name in ALL if sum(f"(../recipes/{name}.py)" in line for line in tables) != 1] == []
    assert [name for name in ALL if sum(f"(../recipes/yaml/{name}.yaml)" in line for line in tables) != 1] == []


@pytest.mark.parametrize("name", SIMPLE)
def test_a_tiny_recipe_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_extra(name)
    check_training(run_log(name, monkeypatch))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "small", "columns"),
    [
        pytest.param("gsm8k", tiny_gsm8k, {"reward/correct", "reward/form", "val/sampled/pass@4"}, id="gsm8k"),
        pytest.param("tools", tiny_tools, {"env/tool_calls", "env/parse_errors", "val/greedy/pass@1"}, id="tools"),
    ],
)
def test_a_recipe_with_a_small_model_of_its_own_logs_its_figures_and_keeps_its_samples(
    name: str, small: Any, columns: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "warm_started_policy", small.untrained_policy)  # what it learns is tested at length
    rows = run_log(name, monkeypatch, "--rollouts=1", "--max_new_tokens=4")
    assert columns <= {column for row in rows for column, value in row.items() if value}
    (folder,) = (Path("runs") / name).iterdir()
    assert list((folder / "checkpoints").iterdir()) and list((folder / "evaluations" / "greedy").iterdir())


@pytest.mark.nightly
def test_the_student_of_the_tiny_distillation_comes_closer_to_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run_log("distillation", monkeypatch)
    check_training(rows)
    gaps = [float(row["teacher_kl/estimate"]) for row in rows]
    assert sum(gaps[-3:]) < 0.6 * sum(gaps[:3])


def test_the_tiny_evaluation_counts_what_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    run("evaluation", "--tiny", monkeypatch=monkeypatch)
    (row,) = last_log("evaluation")
    assert 0 <= float(row["test/sampled/pass@1"]) <= float(row["test/sampled/pass@8"]) <= 1


@pytest.mark.nightly
def test_the_tiny_agent_ends_within_its_rollouts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run("agent", "--tiny", monkeypatch=monkeypatch)
    assert "success before=0." in capfd.readouterr().out


@pytest.mark.nightly
def test_two_tiny_nodes_train_together(workplace: Path) -> None:
    run_nodes(2, [str(RECIPES / "two_nodes.py"), "--tiny", "--rollouts", "2"], workplace)
    rows = last_log("two_nodes")
    assert len(rows) == 2 and {row["kl/ref"] != "" for row in rows} == {True}


@pytest.mark.filterwarnings("ignore:expected a validation within the fit")
@pytest.mark.parametrize("name", [*SIMPLE, "gsm8k", "tools", "two_nodes"])
def test_a_configuration_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_extra(name)
    config = small_configuration(name)
    model, data = config["model"], config["data"]
    config["trainer"]["max_steps"] = model.get("minibatches_per_rollout", 1)
    model["sampling"]["max_new_tokens"], data["prompts_per_rollout"] = 8, 8
    model.pop("engine", None)
    for callback in config["trainer"]["callbacks"]:
        if "max_length" in callback.get("init_args", ()):
            callback["init_args"] = {"max_length": 8, "cache": 1}
    train("fit", saved(config, name), monkeypatch)
    assert len([row for row in last_log(name) if row["optim/grad_norm"]]) == 1


def test_the_configuration_of_an_evaluation_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_configuration("evaluation")
    config["model"]["sampling"]["max_new_tokens"] = 8
    train("test", saved(config, "evaluation"), monkeypatch)
    assert {"test/greedy/pass@1", "test/sampled/pass@8"} <= last_log("evaluation")[-1].keys()


def words_of(name: str) -> list[str]:
    """Options that give a script what :func:`small_configuration` gives to its configuration."""
    options = {"model": tiny.model("mixture" if name == "gspo_moe" else "policy"), "teacher": tiny.model("policy")}
    options |= {"train": tiny.rows_of("train"), "test": tiny.rows_of("test"), **HERE}
    known = inspect.signature(runpy.run_path(str(RECIPES / f"{name}.py"))["main"]).parameters
    return [f"--{option}={value}" for option, value in options.items() if option in known]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*SIMPLE, "agent", "two_nodes"])
def test_script_and_configuration_are_the_same_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_extra(name)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # arguments are given to LightningCLI itself
    arguments = ["--config", saved(small_configuration(name), name)]
    cli = LightningCLI(RLLightningModule, PromptDataModule, args=arguments, run=False)
    cli.trainer.datamodule = cli.datamodule  # pyrefly: ignore[missing-attribute]
    recipe = load_recipe(RECIPES / f"{name}.py", words_of(name))
    of_file, of_script = (
        configuration(cli.model.options, cli.trainer),
        configuration(recipe.module.options, recipe.trainer),
    )
    of_script = json.loads(json.dumps(of_script).replace("__main__.", f"{name}."))
    chosen = of_script["module"]["optimizer"]["keywords"]
    keywords = of_file["module"]["optimizer"]["keywords"]  # with every default
    of_file["module"]["optimizer"]["keywords"] = {option: keywords[option] for option in chosen}
    for option in NAMED_OTHERWISE.get(name, ()):
        del of_file["module"][option], of_script["module"][option]
    for part in ("module", "corrections", "data"):
        assert json.loads(json.dumps(of_file[part])) == of_script[part]
    assert of_file["trainer"]["max_steps"] == of_script["trainer"]["max_steps"]
