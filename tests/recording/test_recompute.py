"""A recorded rollout is computed again bit for bit, and what was changed is named."""

from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import CONVERSATIONS, TURN_ENDS
from kit.support import fit, tiny_model, tiny_module, tiny_prompts
from lightning.pytorch import Callback

from lightning_rl import ClippedSurrogate
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    NoEOSMask,
    OverlongPenalty,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    RouterReplay,
    TruncatedIS,
)
from lightning_rl.corrections import ReplayCorrections
from lightning_rl.recording import Recording, Replayed, RolloutRecorder, replay
from lightning_rl.recording.differences import Difference, recording_differences, replay_differences

EPOCHS = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}
RUNS: dict[str, tuple[dict[str, Any], list[Callback]]] = {
    "grpo": (
        {**EPOCHS, "max_tokens_per_microbatch": 30},
        [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)],
    ),
    "ppo": (
        {**EPOCHS, "advantages": "gae", "critic": "shared", "group_size": 2, "packing": False},
        [NoEOSMask("drop_tokens"), AdaptiveKL(0.05, target=0.01, horizon=20), RewardNormalization(clip=1.0)],
    ),
    "remax": (
        {**EPOCHS, "advantages": "remax", "group_size": 1},
        [AdaptiveKL(0.05, target=0.01, horizon=20), EntropyBonus(0.02, target=2.2, step=0.01)],
    ),
    "clip_cov": (
        {"minibatches_per_rollout": 2, "loss": "clip_cov", "reduction": "sequence_mean"},
        [DynamicSampling(max_rounds=2), TruncatedIS(), IcePop(), OverlongPenalty(8, 4)],
    ),
    "gspo": ({**EPOCHS, "loss": "gspo", "reduction": "sequence_mean"}, [NoEOSMask(), EntropyBonus(0.01)]),
    "kept_tokens": ({**EPOCHS, "top_k": 6}, [TruncatedIS()]),
    "routes": ({**EPOCHS, "policy": partial(tiny_model, "qwen3_moe")}, [RouterReplay()]),
    "ahead": ({**EPOCHS, "max_staleness": 1}, [TruncatedIS(), NoEOSMask()]),
    "conversations": (
        {**EPOCHS, **CONVERSATIONS, "max_new_tokens": 9, "eos_token_ids": TURN_ENDS},
        [NoEOSMask(), OPSM(1e-3), ReferenceKL(0.1, as_loss=True)],
    ),
    "wide_clip": (
        {**EPOCHS, "max_tokens_per_microbatch": 30, "loss": ClippedSurrogate(clip_low=0.99, clip_high=99.0)},
        [OPSM(1e-9)],
    ),
    "one_step": ({"loss": "reinforce", "advantages": "rloo"}, []),
}


def recorded(folder: Path, run: str, **trainer: Any) -> list[Recording]:
    options, corrections = RUNS[run]
    fit(tiny_module(**options), callbacks=[*corrections, RolloutRecorder(folder)], data=tiny_prompts(8, 4), **trainer)
    return [Recording.load(path) for path in sorted(folder.glob("*.json"))]


def replayed(recording: Recording) -> Replayed:
    (found,) = replay([recording], [recording.algorithm()])
    return found


def differing(recording: Recording, found: Replayed) -> dict[str, Difference]:
    return {what: one for what, one in replay_differences(recording, found) if one is not None}


@pytest.mark.filterwarnings("ignore:.*switched on:UserWarning", "ignore:.*groups are missing:UserWarning")
@pytest.mark.parametrize("run", RUNS)
def test_signal_loss_and_gradient_come_out_bit_for_bit(run: str, tmp_path: Path) -> None:
    recordings = recorded(tmp_path, run)
    found = [replayed(recording) for recording in recordings]
    assert [differing(*pair) for pair in zip(recordings, found, strict=True)] == [{}, {}]
    assert any(bool(gradient.any()) for each in found for gradient in each.gradients)


@pytest.mark.nightly
def test_also_under_mixed_precision(tmp_path: Path) -> None:
    for recording in recorded(tmp_path, "grpo", precision="bf16-mixed"):
        assert differing(recording, replayed(recording)) == {}


def tampered(recording: Recording, name: str, row: int, column: int, value: float) -> Recording:
    tensor = recording.tensors[name].clone()
    tensor[row, column] = value
    return changed(recording, tensors={**recording.tensors, name: tensor})


def test_an_advantage_that_the_rewards_do_not_give_is_named_by_sample_and_position(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "one_step")[1]
    wrong = tampered(recording, "rollout/advantages", 2, 0, 7.0)
    found = differing(wrong, replayed(wrong))
    assert list(found) == ["advantages"]
    assert (found["advantages"].number, found["advantages"].place) == (1, "sample 18, position 0")
    assert "7.0 against" in str(found["advantages"])


def test_another_log_probability_changes_gradient_and_loss_of_its_step(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "grpo")[1]
    row = recording.header["plan"][1][0][0]
    wrong = tampered(recording, "pass/1/logprobs", row, 0, -0.5)
    found = differing(wrong, replayed(wrong))
    assert {"loss/total", "gradient of pass 1"} <= found.keys()
    assert found["loss/total"].place == "step 3"
    assert "gradient of pass 0" not in found


def test_another_knob_changes_what_it_touches_and_nothing_before(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "wide_clip")[0]  # so that every token that is rejected has a gradient
    algorithm = recording.algorithm()
    loose = [OPSM(1e6) if isinstance(each, OPSM) else each for each in algorithm.corrections.callbacks]
    (found,) = replay([recording], [algorithm.replace(corrections=ReplayCorrections(loose))], restore=False)
    assert not any(each.any() for each in found.rejected)
    touched = {f"gradient of pass {number}" for number, each in enumerate(replayed(recording).rejected) if each.any()}
    assert touched and differing(recording, found).keys() == {"loss/total", "loss/policy", *touched}


def test_a_correction_that_excludes_takes_rows_out_of_the_recorded_plan(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "grpo")[0]
    other = recording.algorithm().replace(corrections=ReplayCorrections([NoEOSMask("drop_tokens")]))
    (found,) = replay([recording], [other], restore=False)
    truncated = recording.rollout.finish == 1
    assert truncated.any()
    assert not found.rollout.trained[truncated].any()
    assert not found.gradients[0][truncated].any()


def test_two_recordings_of_one_run_are_equal_and_the_first_difference_of_others_comes_first(tmp_path: Path) -> None:
    one, other = (recorded(tmp_path / name, "one_step")[1] for name in ("one", "other"))
    assert list(recording_differences(one, other)) == []
    wrong = tampered(tampered(other, "rollout/advantages", 0, 0, 9.0), "rollout/response_ids", 1, 0, 15)
    found = list(recording_differences(one, wrong))
    assert [(each.what, each.place) for each in found] == [
        ("rollout/response_ids", "sample 17, position 0"),
        ("rollout/advantages", "sample 16, position 0"),
    ]


def test_nothing_global_is_left_behind(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "one_step")[0]
    before = torch.get_num_threads()
    replayed(recording)
    assert torch.get_num_threads() == before


@pytest.mark.nightly
def test_audit_and_ledger_leave_a_recording_alone(tmp_path: Path) -> None:
    watching = [SignalAudit(1, "raise"), SignalLedger()]
    options, corrections = RUNS["grpo"]
    for folder, others in (("alone", []), ("watched", watching)):
        callbacks = [*corrections, *others, RolloutRecorder(tmp_path / folder)]
        fit(tiny_module(**options), callbacks=callbacks, data=tiny_prompts(8, 4))
    for name in ("rollout-000000.json", "rollout-000001.json"):
        alone, watched = (Recording.load(tmp_path / folder / name) for folder in ("alone", "watched"))
        assert list(recording_differences(alone, watched)) == []
        assert differing(watched, replayed(watched)) == {}
