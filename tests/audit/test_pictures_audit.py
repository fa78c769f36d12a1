"""The audit of a run with pictures: silent without a fault, and a finding for a picture that a row does not have."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.support import fit
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW

from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.audit import SignalAudit
from lightning_rl.data import encoding
from lightning_rl.fields import Items, Ragged
from lightning_rl.policy import media, model
from lightning_rl.rollouts import ahead, collector

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import vision_task as task


def findings(
    folder: Path, *, steps: int = 2, minibatches: int = 1, staleness: int = 0, resumes: bool = False, **options: Any
) -> list[dict[str, Any]]:
    module = RLLightningModule(
        policy=partial(task.untrained_policy, 0),
        tokenizer=task.color_processor(),
        rewards=task.color_named,
        sampling=SamplingParams(max_new_tokens=4),
        optimizer=partial(AdamW, lr=1e-3),
        group_size=4,
        minibatches_per_rollout=minibatches,
        max_staleness=staleness,
    )
    data = PromptDataModule(task.color_rows(32, seed=0), 8, **options)
    saves = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if staleness else []
    known: dict[str, Any] = {"default_root_dir": folder, "enable_checkpointing": bool(saves), "max_steps": steps}
    ckpt_path = folder / "step=2.ckpt" if resumes else None
    fit(module, callbacks=[SignalAudit(), *saves], data=data, ckpt_path=ckpt_path, **known)
    files = list(folder.rglob("findings-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def rows_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the picture of the next group."""
    lay_out = collector.lay_out

    def roll_items(*given: Any, **options: Any) -> Any:
        rows = lay_out(*given, **options)
        items = {
            name: Ragged(value.values, value.counts.roll(4), value.begins.roll(4))
            for name, value in rows.prompt_items.items()
        }
        return rows.replace(prompt_items=items)

    monkeypatch.setattr(collector, "lay_out", roll_items)


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have no picture."""
    lay_out = collector.lay_out
    monkeypatch.setattr(collector, "lay_out", lambda *given, **named: lay_out(*given, **named).replace(prompt_items={}))


def positions_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of pictures are counted as those of text."""
    arguments = media.media_arguments

    def flat(whole: Any, inputs: Any, positions: Any) -> Any:
        return {**arguments(whole, inputs, positions), "position_ids": positions.expand(3, *inputs.place.shape)}

    monkeypatch.setattr(model, "media_arguments", flat)


def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of a microbatch are in the order of rows reversed."""
    arguments = media.media_arguments

    def reversed_items(whole: Any, inputs: Any, positions: Any) -> Any:
        found = arguments(whole, inputs, positions)
        grids = len(found["image_grid_thw"])
        pixels = found["pixel_values"].view(grids, -1, found["pixel_values"].shape[-1]).flip(0)
        return {**found, "pixel_values": pixels.flatten(0, 1)}

    monkeypatch.setattr(model, "media_arguments", reversed_items)


def test_a_run_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    assert findings(tmp_path, minibatches=2) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_picture_with_exchanged_colors_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels_of = encoding.pixels_of
    monkeypatch.setattr(encoding, "pixels_of", lambda value, name: pixels_of(value, name).flip(-1))
    held_out = task.color_rows(8, seed=9)
    found = {each["check"]: each["observed"] for each in findings(tmp_path, validation=held_out)}
    assert list(found) == ["picture_source"] and found["picture_source"].endswith("of the validation set")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pictures_that_are_not_selected_with_their_rows_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = Items.select

    def in_order(self: Items, value: Any, rows: Any, width: int) -> Any:
        return select(self, value, rows.sort().values if self.shared else rows, width)

    monkeypatch.setattr(Items, "select", in_order)
    (found,) = findings(tmp_path, minibatches=2)
    assert found["check"] == "weight_sync" and found["culprit"].endswith("the rows of its microbatches")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_samples_that_a_resumed_run_loads_with_the_pictures_of_neighbors_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = ahead.trajectories_of_state

    def shift(state: Any, prompts: Sequence[Any]) -> Any:
        media = {each.index: other.media for each, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True)}
        return [
            replace(one, request=replace(one.request, media=media[one.prompt.index])) for one in restore(state, prompts)
        ]

    assert findings(tmp_path, steps=4, staleness=1) == []
    monkeypatch.setattr(ahead, "trajectories_of_state", shift)
    found = findings(tmp_path, steps=4, staleness=1, resumes=True)
    assert {each["check"] for each in found} == {"prompt_source"} and found[0]["rollout"] == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", [rows_of_neighbors, without_pictures])
def test_a_picture_of_another_row_or_none_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert "prompt_source" in {each["check"] for each in findings(tmp_path)}


@pytest.mark.parametrize("fault", [positions_of_text, another_order])
def test_pictures_at_other_positions_or_in_another_order_are_refused_at_setup(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(ValueError, match="as alone with pictures"):
        findings(tmp_path)
