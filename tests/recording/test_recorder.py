"""Rollouts are recorded whole, without touching the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of

from lightning_rl.callbacks import OPSM, DynamicSampling, NoEOSMask, ReferenceKL
from lightning_rl.recording import Recording, RolloutRecorder, recording

OPTIONS: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}


def recorded(
    folder: Path, *, rollouts: int = 2, every_n_rollouts: int = 1, keep: int | None = None, **trainer: Any
) -> list[str]:
    own = RolloutRecorder(folder, every_n_rollouts, keep=keep)
    fit(tiny_module(**OPTIONS), callbacks=[NoEOSMask(), own], data=tiny_prompts(4 * rollouts, 4), **trainer)
    return sorted(path.name for path in folder.iterdir())


def test_a_recorded_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    modules = [tiny_module(**OPTIONS) for _ in range(2)]
    fit(modules[0], callbacks=[OPSM(1e-3)], data=tiny_prompts(8, 4))
    fit(modules[1], callbacks=[RolloutRecorder(tmp_path), OPSM(1e-3)], data=tiny_prompts(8, 4))
    one, other = map(weights_of, modules)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_nth_rollout_has_two_files(tmp_path: Path) -> None:
    names = recorded(tmp_path, rollouts=3, every_n_rollouts=2)
    stems = ["rollout-000000", "rollout-000002"]
    assert names == [f"{stem}.{kind}" for stem in stems for kind in ("json", "safetensors")]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert recorded(tmp_path, rollouts=3, keep=1) == ["rollout-000002.json", "rollout-000002.safetensors"]


def test_a_run_that_ends_within_a_rollout_records_the_steps_it_made(tmp_path: Path) -> None:
    recorded(tmp_path, max_steps=3)
    assert len(Recording.load(tmp_path / "rollout-000000.json").header["steps"]) == 3


def test_a_recording_holds_every_field_and_what_each_pass_computed(tmp_path: Path) -> None:
    module = tiny_module(**OPTIONS, advantages="gae", critic="shared")
    fit(module, callbacks=[ReferenceKL(0.1), RolloutRecorder(tmp_path)], data=tiny_prompts(4, 4))
    found = Recording.load(tmp_path / "rollout-000000.safetensors")
    per_pass = {f"pass/{number}/{what}" for number in (0, 1) for what in ("logprobs", "entropy", "values", "gradient")}
    logprobs = {f"rollout/{name}_logprobs" for name in ("rollout", "old", "ref")}
    assert found.tensors.keys() >= per_pass | logprobs | {"rollout/values", "rollout/advantages", "sampled/scored"}
    valid = found.rollout.valid_tokens
    assert torch.equal(found.tensors["pass/0/logprobs"][valid] != 0, torch.ones(int(valid.sum()), dtype=torch.bool))
    assert found.header["options"]["group_size"] == 4
    assert found.header["samples"][0]["finish"] in ("stop", "length")
    assert len({step["weights"] for step in found.header["steps"]}) == 4


@pytest.mark.filterwarnings("ignore:rollout . taught the policy nothing")
def test_a_filtered_group_is_no_part_of_a_recording(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="groups are missing"):
        fit(
            tiny_module(rewards=lambda prompts, *_, **__: [0.0 if prompts[0] else 1.0] * len(prompts)),
            callbacks=[DynamicSampling(max_rounds=2), RolloutRecorder(tmp_path)],
            data=tiny_prompts(8, 4),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_could_not_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(recording, "save_file", full)
    with pytest.warns(UserWarning, match=r"expected to write a recording of rollout \d to .*, got no space left"):
        recorded(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("every", "keep"), [(0, None), (1, 0)])
def test_numbers_below_one_are_refused(every: int, keep: int | None) -> None:
    with pytest.raises(ValueError, match=r"expected (every_n_rollouts|keep) to be a whole number above 0"):
        RolloutRecorder("anywhere", every, keep=keep)
