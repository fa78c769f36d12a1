"""The command lines that recipes name for GPUs, each parsed as it stands and run through its first rollouts.

vLLM is the fake of ``kit/fake_vllm.py``; models, rows and sizes are small, under the names that the commands use. One
process stands for the devices, so what chooses machines and splits an engine over them is replaced. What is left is as
on a GPU: options, precision, strategy, dtypes of the engine, sleep states, the canary. Recipes with servers are
built by ``test_every_recipe.py``.
"""

import csv
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import sorting_task
import tiny
import torch
import torch.distributed as dist
import yaml
from kit.fake_vllm import fake_vllm
from lightning.pytorch import Trainer

import lightning_rl
from lightning_rl import VLLMEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* groups are missing after"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:no token of the canary visits 2 of the experts"),  # of an untrained mixture
]

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
COMMAND = re.compile(r"^ +(?:CUDA_VISIBLE_DEVICES=\d+ )?python (recipes/.*\.py.*)$", re.MULTILINE)
ELSEWHERE = ("cispo_servers", "train")
LAPTOP = ("agent", "quickstart")  # for a CPU, unless vLLM is the engine
COMMANDS = sorted(
    command
    for path in RECIPES.glob("*.py")
    for command in COMMAND.findall(path.read_text())
    if "--tiny" not in command
    and path.stem not in ELSEWHERE
    and (path.stem not in LAPTOP or "--engine vllm" in command)
)
MACHINES: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
SIZES = {"rollouts": 1, "prompts_per_rollout": 4, "max_new_tokens": 8, "samples": 2, "warm_start": 4, "rows": 64}
EXTRAS = {"lora": "peft", "reasoning": "reasoning_gym"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with small models and rows under the names of large ones, relative to it as the hub's are."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(autouse=True)
def _there(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # lightning 2.6 with jsonargparse >= 4.49
    for size in ("0.5B", "1.5B", "3B", "7B"):
        _link(Path(f"Qwen/Qwen2.5-{size}-Instruct"), tiny.model("policy"))
    _link(Path("Qwen/Qwen3-30B-A3B-Instruct-2507"), tiny.model("mixture"))
    for split in ("train", "test"):
        rows = [json.loads(line) for line in tiny.rows_of(split).read_text().splitlines()[:32]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for path in (Path("recipes/data/gsm8k") / f"{split}.jsonl", Path("openai/gsm8k") / f"{split}.jsonl"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    card = {"config_name": "main", "data_files": [{"split": s, "path": f"{s}.jsonl"} for s in ("train", "test")]}
    Path("openai/gsm8k/README.md").write_text(f"---\n{yaml.safe_dump({'configs': [card]})}---\n")
    Path("recipes/yaml").mkdir(exist_ok=True)
    for path in (RECIPES / "yaml").glob("*.yaml"):
        Path("recipes/yaml", path.name).write_text(yaml.safe_dump(small_configuration(path)))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class WholeEngine(VLLMEngine):
    """Engine of one device for any number of devices of the recipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if name != "tensor_parallel_size"})


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.symlink_to(target.resolve())


def small_configuration(path: Path) -> dict[str, Any]:
    """Return a configuration with the sizes of this test; precision, strategy and engine are left."""
    config = yaml.safe_load(path.read_text())
    model, trainer = config["model"], config["trainer"]
    trainer |= {**MACHINES, "enable_progress_bar": False}
    if "max_steps" in trainer:
        trainer["max_steps"] = model.get("minibatches_per_rollout", 1)
    if "val_check_interval" in trainer:
        trainer["val_check_interval"] = 1
    model["sampling"]["max_new_tokens"] = SIZES["max_new_tokens"]
    config["data"]["prompts_per_rollout"] = SIZES["prompts_per_rollout"]
    for callback in trainer.get("callbacks", ()):
        if "max_length" in callback.get("init_args", ()):
            callback["init_args"] = {"max_length": SIZES["max_new_tokens"], "cache": 1}
    return config


def one_machine(**options: Any) -> Trainer:
    """Return the Trainer of a recipe on this machine."""
    return Trainer(**options | MACHINES | {"enable_progress_bar": False})


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Run a command line; return the rows that it logged."""
    script, *words = shlex.split(command)
    name = Path(words[-1] if "--config" in words else script).stem
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    if "--config" not in words:
        source = (ROOT / script).read_text()
        words += [f"--{option}={value}" for option, value in SIZES.items() if re.search(rf"\b{option}: int", source)]
    monkeypatch.setattr(sys, "argv", [script, *words])
    if "--config" not in words:
        monkeypatch.setattr(lightning.pytorch, "Trainer", one_machine)
    runpy.run_path(str(ROOT / script), run_name="__main__")
    runs = Path("runs") / {"quickstart": "sorting"}.get(name, name)
    folder = max(runs.iterdir(), key=lambda path: int(path.name.removeprefix("version_")))
    with (folder / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_of_a_recipe_comes_through_its_first_rollout(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_rl, "VLLMEngine", WholeEngine)
    monkeypatch.setattr(sorting_task, "WARM_START_STEPS", 4)
    monkeypatch.setattr(sorting_task, "held_out_prompts", partial(sorting_task.held_out_prompts, 16))
    monkeypatch.setattr(sorting_task, "warm_started", sorting_task.warm_started.__wrapped__)  # nothing is cached
    with fake_vllm(gpus=1) as fake:
        rows = run(command, monkeypatch)
        uses_vllm = "--engine vllm" in command or "gspo_moe" in command
        dtype = torch.float32 if Path(command.split()[0]).stem in LAPTOP else torch.bfloat16
        assert [built.dtype for built in fake.built] == ([dtype] if uses_vllm else [])
    if "evaluation" not in command:
        norms = [float(row["optim/grad_norm"]) for row in rows if row.get("optim/grad_norm")]
        assert norms and all(torch.isfinite(torch.tensor(norms)))
