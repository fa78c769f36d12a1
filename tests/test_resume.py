"""A run that is interrupted at any optimizer step and resumed ends bitwise like the run that was not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import a_trainer, differing, fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import RLLightningModule, warmup_then_linear
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    EntropyBonus,
    NoEOSMask,
    ReferenceKL,
    RolloutKL,
    RouterAuxLoss,
    RouterReplay,
    ScoreCentering,
)
from lightning_rl.metrics import is_of_the_clock

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning",  # Lightning, of every checkpoint under manual optimization
    "ignore:The dirpath has changed:UserWarning",  # a resumed run of these tests saves elsewhere
)

STEPS = 10  # two epochs of two rollouts with K = 4, and half a rollout more
GRPO: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}
PPO: dict[str, Any] = {
    "minibatches_per_rollout": 2,
    "epochs_per_rollout": 2,
    "advantages": "gae",
    "critic": "shared",
    "group_size": 1,
}
REMAX: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2, "advantages": "remax", "group_size": 1}
REPLAYED: dict[str, Any] = {
    "minibatches_per_rollout": 2,
    "epochs_per_rollout": 2,
    "policy": partial(tiny_model, "qwen3_moe"),
    "top_p": 0.9,
}


def corrections(options: dict[str, Any]) -> list[Callback]:
    if "critic" in options:
        return [NoEOSMask(), ReferenceKL(0.05)]
    if "top_p" in options:
        return [RouterReplay(), RouterAuxLoss(0.1), ScoreCentering(4), ReferenceKL(0.1, as_loss=True)]
    if options.get("advantages") == "remax":
        return [AdaptiveKL(0.05, target=0.01, horizon=20), EntropyBonus(0.02, target=2.2, step=0.01)]
    return [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]


def run(folder: Path, options: dict[str, Any], *, ckpt_path: Path | None = None, **trainer: Any) -> RLLightningModule:
    module = tiny_module(**options, lr_scheduler=warmup_then_linear(2, 20))
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(
        module,
        callbacks=[*corrections(options), saving],
        data=tiny_prompts(8, 4, validation=[[2, 3], [5]]),
        ckpt_path=ckpt_path,
        **{
            "max_epochs": 4,
            "max_steps": STEPS,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "enable_checkpointing": True,
            **trainer,
        },
    )
    return module


def assert_same_weights(one: RLLightningModule, other: RLLightningModule) -> None:
    assert differing(one, other) == []
    states = [[callback.state_dict() for callback in each.run.corrections.callbacks] for each in (one, other)]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRPO, id="grpo"),
        pytest.param(PPO, id="ppo", marks=pytest.mark.nightly),
        pytest.param(REMAX, id="remax", marks=pytest.mark.nightly),
    ],
)
def test_resuming_at_every_step_of_a_run_ends_bitwise_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = run(tmp_path / "whole", options)
    for step in range(1, STEPS):
        resumed = run(tmp_path / f"resumed-{step}", options, ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert_same_weights(resumed, expected)


def test_a_checkpoint_after_an_evaluation_of_other_data_resumes_the_fit(tmp_path: Path) -> None:
    expected, module = tiny_module(minibatches_per_rollout=2), tiny_module(minibatches_per_rollout=2)
    fit(expected, max_steps=5, max_epochs=9)
    trainer = fit(module, max_steps=1, max_epochs=9)
    trainer.validate(module, tiny_prompts(validation=[[2]]), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = tiny_module(minibatches_per_rollout=2)
    fit(resumed, max_steps=5, max_epochs=9, ckpt_path=tmp_path / "after.ckpt")
    assert differing(resumed, expected) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_of_a_trainer_that_did_not_fit_is_not_resumed(tmp_path: Path, steps: int) -> None:
    module, evaluating = tiny_module(), a_trainer()
    if steps:
        fit(module, max_steps=steps)
    evaluating.validate(module, tiny_prompts(validation=[[2]]), verbose=False)
    evaluating.save_checkpoint(tmp_path / "evaluated.ckpt")
    with pytest.raises(ValueError, match=r"expected a checkpoint of a Trainer that fits, got one .* an evaluation"):
        fit(tiny_module(), ckpt_path=tmp_path / "evaluated.ckpt")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [GRPO, REPLAYED], ids=["grpo", "replayed"])
def test_resuming_within_a_rollout_ends_bitwise_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = run(tmp_path / "whole", options)
    assert_same_weights(run(tmp_path / "resumed", options, ckpt_path=tmp_path / "whole" / "step=6.ckpt"), expected)


def test_coefficients_that_adapt_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, REMAX, max_steps=7)
    states = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["callbacks"]
    assert states["adaptive_kl"]["beta"] != 0.05 and states["entropy_bonus"].keys() == {"coef", "entropy"}
    last = torch.load(tmp_path / "step=7.ckpt", weights_only=True)["callbacks"]
    assert last["entropy_bonus"]["coef"] == pytest.approx(states["entropy_bonus"]["coef"], abs=0.01 + 1e-12)
    assert last["entropy_bonus"] != states["entropy_bonus"] and last["adaptive_kl"] == states["adaptive_kl"]


@pytest.mark.nightly
def test_the_logged_rows_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def rows(logger: CSVLogger) -> dict[int, dict[str, float]]:
        return {
            int(row["step"]): {key: value for key, value in row.items() if not is_of_the_clock(key)}
            for row in logger.experiment.metrics
            if "reward/task" in row
        }

    class Keeps(CSVLogger):
        def save(self) -> None:
            pass

    whole, resumed = Keeps(tmp_path, "whole"), Keeps(tmp_path, "resumed")
    run(tmp_path / "one", GRPO, logger=whole, log_every_n_steps=3)
    run(tmp_path / "two", GRPO, logger=resumed, log_every_n_steps=3, ckpt_path=tmp_path / "one" / "step=4.ckpt")
    expected = {step: row for step, row in rows(whole).items() if step >= 4}
    assert expected and rows(resumed) == expected


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")  # without its callbacks
@pytest.mark.parametrize("name", ["step=2.ckpt", "step=4.ckpt"])
def test_evaluating_a_checkpoint_leaves_no_rollout_behind_for_a_later_fit(tmp_path: Path, name: str) -> None:
    run(tmp_path, GRPO, max_steps=4)
    module, data = tiny_module(**GRPO), tiny_prompts(8, 4, validation=[[2, 3]])
    trainer = a_trainer()
    trainer.validate(module, data, ckpt_path=tmp_path / name, verbose=False)
    assert module.run.loaded is None and data.position.cursor == 0


def test_a_checkpoint_that_leaves_nothing_to_train_says_so_and_more_epochs_go_on(tmp_path: Path) -> None:
    fit(tiny_module(minibatches_per_rollout=2), max_steps=3).save_checkpoint(tmp_path / "ended.ckpt")
    at_the_end = tiny_module(minibatches_per_rollout=2)
    with pytest.warns(UserWarning, match="nothing is left to train: the checkpoint is at step 3 with max_steps=8"):
        fit(at_the_end, ckpt_path=tmp_path / "ended.ckpt", max_steps=8)
    assert at_the_end.global_step == 3
    whole, longer = tiny_module(minibatches_per_rollout=2), tiny_module(minibatches_per_rollout=2)
    fit(whole, max_steps=8)
    fit(longer, ckpt_path=tmp_path / "ended.ckpt", max_steps=8, max_epochs=2)
    assert longer.global_step == 8
    assert_same_weights(longer, whole)


def test_a_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    run(tmp_path, GRPO, max_steps=2)
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"]["ranks"][0]["current"]["number"] == 0
    assert not any("reference" in name for name in checkpoint["state_dict"])


def test_another_number_of_ranks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    run(tmp_path, GRPO, max_steps=2)
    path = tmp_path / "step=2.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lightning_rl"]["ranks"] *= 2
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="expected a checkpoint of 1 ranks, got one of 2"):
        run(tmp_path / "resumed", GRPO, ckpt_path=path)


def test_another_reference_is_refused(tmp_path: Path) -> None:
    run(tmp_path, GRPO, max_steps=2)
    options = {**GRPO, "reference": lambda: tiny_policy(7), "allow_config_changes": ["reference"]}
    with pytest.raises(ValueError, match="expected the reference of the checkpoint"):
        run(tmp_path / "resumed", options, ckpt_path=tmp_path / "step=2.ckpt")
