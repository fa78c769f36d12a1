"""The audit of a run with pictures: silent without a fault, and a finding for a picture that a row does not have."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.support import fit
from torch.optim import AdamW

from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.audit import SignalAudit
from lightning_rl.fields import Ragged
from lightning_rl.policy import media, model
from lightning_rl.rollouts import collector

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import vision_task as task


def findings(folder: Path) -> list[dict[str, Any]]:
    module = RLLightningModule(
        policy=partial(task.untrained_policy, 0),
        tokenizer=task.color_processor(),
        rewards=task.color_named,
        sampling=SamplingParams(max_new_tokens=4),
        optimizer=partial(AdamW, lr=1e-3),
        group_size=4,
    )
    data = PromptDataModule(task.color_rows(16, seed=0), 8)
    fit(module, callbacks=[SignalAudit()], data=data, max_steps=2, default_root_dir=folder)
    files = list(folder.rglob("findings-0.jsonl"))
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
    assert findings(tmp_path) == []


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
