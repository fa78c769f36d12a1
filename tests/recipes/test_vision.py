"""The recipe with pictures: it learns, resumes exactly, replays, and does not depend on how its batches are made."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import a_trainer, differing, recorder
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW

from lightning_rl import ModelOptions, PromptDataModule, RLLightningModule, Rollout, SamplingParams
from lightning_rl.callbacks import ReferenceKL, TruncatedIS
from lightning_rl.recording import RolloutRecorder
from lightning_rl.recording.differences import replay_differences
from lightning_rl.recording.recompute import replay
from lightning_rl.recording.recording import Recording

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.append(str(RECIPES))
import vision_task as task  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of a policy that has learned nothing yet


def adapted_policy() -> Any:
    targets = r"model\.language_model\.layers\.\d+\.self_attn\.(q|v)_proj"
    return get_peft_model(task.untrained_policy(0), LoraConfig(r=2, target_modules=targets))


def run(
    callbacks: Any = (), *, ckpt_path: Path | None = None, max_steps: int = 6, **options: Any
) -> tuple[RLLightningModule, list[Rollout]]:
    seen: list[Rollout] = []
    defaults: dict[str, Any] = {
        "policy": partial(task.untrained_policy, 0),
        "tokenizer": task.color_processor(),
        "rewards": task.color_named,
        "sampling": SamplingParams(max_new_tokens=3),
        "optimizer": partial(AdamW, lr=1e-3),
        "group_size": 4,
        "minibatches_per_rollout": 2,
    }
    module = RLLightningModule(**{**defaults, **options})
    data = PromptDataModule(task.color_rows(12, seed=0), 4, validation=task.color_rows(4, seed=1))
    trainer = a_trainer(
        [*callbacks, recorder(seen)("watch")], max_steps=max_steps, enable_checkpointing=bool(callbacks)
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, seen


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_pictures_resumes_bitwise(staleness: int, tmp_path: Path) -> None:
    corrections = [TruncatedIS()] if staleness else []
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    expected, _ = run([saving, *corrections], max_staleness=staleness)
    for step in (1, 2, 3):
        resumed, _ = run(corrections, ckpt_path=tmp_path / f"step={step}.ckpt", max_staleness=staleness)
        assert differing(resumed, expected) == []


@pytest.mark.parametrize(
    "model",
    [
        ModelOptions(packing=False),
        ModelOptions(max_tokens_per_microbatch=60),
        ModelOptions(activation_checkpointing="full"),
        ModelOptions(activation_checkpointing="selective"),
    ],
    ids=["padded", "small microbatches", "full", "selective"],
)
def test_how_microbatches_are_computed_does_not_matter(model: ModelOptions) -> None:
    one, other = run(max_steps=2)[0], run(max_steps=2, model=model)[0]
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], weight, atol=1e-5, rtol=0)


def test_adapters_of_the_language_model_train_alone() -> None:
    callbacks = [ReferenceKL(as_loss=True)]
    before, module = dict(adapted_policy().named_parameters()), run(callbacks, policy=adapted_policy, max_steps=2)[0]
    after = dict(module.required_policy.model.named_parameters())
    moved = {
        name
        for name, weight in before.items()
        if not torch.equal(weight, after[name.removeprefix("base_model.model.")])
    }
    assert moved and all("lora_" in name for name in moved)


def test_towers_stay_frozen_and_a_picture_is_encoded_once_for_its_group() -> None:
    module, seen = run(max_steps=2)
    frozen = [name for name, weight in module.named_parameters() if not weight.requires_grad]
    assert frozen and all(".visual." in name for name in frozen)
    assert [len(rows.prompt_items["image_grid_thw"].values) for rows in seen] == [4] * len(seen)


def test_a_recording_with_pictures_replays_bitwise(tmp_path: Path) -> None:
    run([RolloutRecorder(tmp_path)], max_steps=2)
    recording = Recording.load(tmp_path / "rollout-000000.json")
    (replayed,) = replay([recording], [recording.algorithm()])
    assert not [name for name, difference in replay_differences(recording, replayed) if difference is not None]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_the_recipe_learns(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, RECIPES / "vision.py", "--tiny", "--seed", str(seed)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.search(r"^accuracy before=(\S+) after=(\S+)$", ran.stdout, re.MULTILINE)
    assert found and float(found[1]) < 0.5 and float(found[2]) >= 0.9
