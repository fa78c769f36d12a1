"""Resuming under another configuration: each difference is named, and accepted only by name."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Echo, Rewriting
from kit.support import a_trainer, fit, parity_reward, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from lightning_rl import ClippedSurrogate, Conversations, Critic, PromptDataModule, Rewards, ValueLoss
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import OPSM, AdaptiveKL, NoEOSMask
from lightning_rl.configuration import check_resume
from lightning_rl.optimizers import warmup_then_linear
from lightning_rl.serialization import describe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pre-optimization state.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:with one optimizer step per rollout:UserWarning"),
    pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples of earlier weights:UserWarning"),
]


def longer(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two of four rollouts."""
    folder = tmp_path_factory.mktemp("run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
        fit(tiny_module(), callbacks=[NoEOSMask(), saving], max_steps=2, enable_checkpointing=True)
    return folder / "step=2.ckpt"


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two of four rollouts under a schedule."""
    folder = tmp_path_factory.mktemp("scheduled")
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
    fit(tiny_module(lr_scheduler=warmup_then_linear(1, 9)), callbacks=[saving], max_steps=2, enable_checkpointing=True)
    return folder / "step=2.ckpt"


def resume(checkpoint: Path, *, callbacks: Any = None, data: PromptDataModule | None = None, **options: Any) -> Any:
    trainer = {name: options.pop(name) for name in ("precision",) if name in options}
    corrections = [NoEOSMask()] if callbacks is None else callbacks
    return fit(tiny_module(**options), callbacks=corrections, data=data, ckpt_path=checkpoint, **trainer)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "name", "difference"),
    [
        ({"seed": 1}, "seed", "seed: 0 in the checkpoint, 1 now"),
        ({"group_size": 2}, "group_size", "group_size: 4 in the checkpoint, 2 now"),
        ({"temperature": 0.5}, "sampling", "sampling.temperature: 1.0 in the checkpoint, 0.5 now"),
        ({"loss": "reinforce"}, "loss", "loss: ClippedSurrogate in the checkpoint, Reinforce now"),
        ({"loss": ClippedSurrogate(clip_high=0.3)}, "loss", "loss.clip_high: 0.2 in the checkpoint, 0.3 now"),
        ({"advantages": "rloo"}, "advantages", "advantages: GRPO in the checkpoint, RLOO now"),
        ({"rewards": longer}, "rewards", "rewards.functions.longer: nothing in the checkpoint"),
        ({"rewards": {"parity_reward": (parity_reward, 2.0)}}, "rewards", "rewards.functions.parity_reward: "),
        (
            {"optimizer": partial(AdamW, lr=1e-3, weight_decay=0.0)},
            "optimizer",
            "lr: 0.01 in the checkpoint, 0.001",
        ),
        (
            {"lr_scheduler": warmup_then_linear(1, 9)},
            "lr_scheduler",
            "lr_scheduler: None in the checkpoint, {'partial': ",
        ),
        ({"max_staleness": 1, "loss": "ppo"}, "max_staleness", "max_staleness: 0 in the checkpoint, 1 now"),
        ({"max_grad_norm": 0.5}, "max_grad_norm", "max_grad_norm: 1.0 in the checkpoint, 0.5 now"),
        ({"callbacks": []}, "corrections", "corrections.no_eos_mask: NoEOSMask in the checkpoint, nothing now"),
        ({"callbacks": [NoEOSMask(), OPSM()]}, "corrections", "corrections.opsm: nothing in the checkpoint, OPSM now"),
        ({"callbacks": [NoEOSMask("drop_tokens")]}, "corrections", "corrections.no_eos_mask.action: 'zero_reward' in"),
        ({"precision": "bf16-mixed"}, "precision", "precision: '32-true' in the checkpoint, 'bf16-mixed' now"),
        ({"data": tiny_prompts(12)}, "data", "data.prompts.rows: 16 in the checkpoint, 12 now"),
        ({"data": tiny_prompts(seed=3)}, "data", "data.seed: 0 in the checkpoint, 3 now"),
        ({"data": tiny_prompts(shuffle=False)}, "data", "data.shuffle: True in the checkpoint, False now"),
    ],
)
def test_each_difference_is_named_and_accepted_only_by_name(
    checkpoint: Path, options: dict[str, Any], name: str, difference: str
) -> None:
    accepted = name in ("seed", "optimizer", "corrections", "precision", "data")  # one of each part
    with pytest.raises(ValueError, match="expected the configuration of the checkpoint, got another") as refused:
        resume(checkpoint, **options)
    message = str(refused.value)
    assert difference in message
    assert f"allow_config_changes=['{name}']" in message
    check_only(message, difference)
    if accepted:
        assert resume(checkpoint, allow_config_changes=[name], **options).global_step >= 3


def check_only(message: str, difference: str) -> None:
    """Nothing else is named; other data have another fingerprint as well."""
    lines = [line for line in message.splitlines() if line.startswith("  ")]
    others = [line for line in lines if difference not in line and "fingerprint" not in line]
    assert others == [] or difference.startswith("rewards.functions.longer"), others


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (warmup_then_linear(1, 90), "lr_scheduler.keywords.total: 9 in the checkpoint, 90 now"),
        (None, "lr_scheduler: {'partial'.* in the checkpoint, None now"),
        (
            partial(CosineAnnealingLR, T_max=5),
            "lr_scheduler.partial: '.*WarmupThenLinear' in .* '.*CosineAnnealingLR' now",
        ),
    ],
)
def test_a_schedule_of_the_learning_rate_is_part_of_what_trains(now: Any, difference: str, scheduled: Path) -> None:
    with pytest.raises(ValueError, match=difference):
        resume(scheduled, callbacks=[], lr_scheduler=now)
    accepted = resume(scheduled, callbacks=[], lr_scheduler=now, allow_config_changes=["lr_scheduler"])
    assert accepted.global_step == 4


def test_the_same_schedule_resumes(scheduled: Path) -> None:
    assert resume(scheduled, callbacks=[], lr_scheduler=warmup_then_linear(1, 9)).global_step == 4


def test_several_differences_are_named_at_once(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"allow_config_changes=\['seed', 'corrections'\]"):
        resume(checkpoint, seed=1, callbacks=[])
    with pytest.raises(ValueError, match=r"allow_config_changes=\['corrections'\]"):
        resume(checkpoint, seed=1, callbacks=[], allow_config_changes=["seed"])


def test_steps_per_rollout_cannot_change_within_a_run(checkpoint: Path) -> None:
    with pytest.raises(
        ValueError, match="start a new run from its weights, since minibatches_per_rollout cannot change within a run"
    ):
        resume(checkpoint, minibatches_per_rollout=2, allow_config_changes=["minibatches_per_rollout"])


def test_what_bends_no_result_may_change(checkpoint: Path) -> None:
    module = {"max_tokens_per_microbatch": 64, "packing": False}
    rewards = Rewards(parity_reward, timeout=9.0, max_failure_rate=None)
    assert resume(checkpoint, rewards=rewards, **module).global_step == 4


def compare(option: str, before: Any, now: Any, allow_config_changes: Sequence[str] = ()) -> None:
    """Compares two configurations that differ in one option."""
    old, new = (
        {"module": {option: describe(value)}, "corrections": {}, "data": {}, "trainer": {"precision": "32-true"}}
        for value in (before, now)
    )
    check_resume({**old, "versions": {}}, {**new, "versions": {}}, allow_config_changes)


def test_workers_and_limits_of_failures_may_change() -> None:
    now = Conversations(Echo, max_turns=4, workers=2, step_timeout=9.0, timeout=90.0, max_failure_rate=None)
    compare("environment", Conversations(Echo, max_turns=4), now)


@pytest.mark.parametrize(
    ("option", "before", "now", "difference"),
    [
        ("environment", Conversations(Echo), Conversations(Echo, max_turns=4), "environment.max_turns: 8 in .*, 4 now"),
        (
            "environment",
            Conversations(Echo),
            Conversations(Rewriting),
            "environment.source.name: .*Echo' in .*Rewriting",
        ),
        ("environment", Conversations(Echo), None, "environment: Conversations in the checkpoint, None now"),
        (
            "critic",
            Critic("shared"),
            Critic("shared", loss=ValueLoss(coef=0.5)),
            "critic.loss.coef: 1.0 in .*0.5 now",
        ),
        ("critic", None, Critic("shared"), "critic: None in the checkpoint, Critic now"),
    ],
)
def test_a_difference_nested_in_a_group_is_named(option: str, before: Any, now: Any, difference: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){difference}.*allow_config_changes=\['{option}'\]"):
        compare(option, before, now)
    compare(option, before, now, [option])


def test_who_only_looks_on_may_come_and_go(checkpoint: Path) -> None:
    assert resume(checkpoint, callbacks=[NoEOSMask(), SignalLedger(), SignalAudit()]).global_step == 4


def test_a_coefficient_that_moved_comes_from_the_checkpoint(tmp_path: Path) -> None:
    adaptive = AdaptiveKL(0.1, as_loss=True, horizon=8)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    fit(tiny_module(), callbacks=[adaptive, saving], max_steps=2, enable_checkpointing=True)
    assert adaptive.beta != 0.1
    fresh = AdaptiveKL(0.1, as_loss=True, horizon=8)
    assert resume(tmp_path / "step=2.ckpt", callbacks=[fresh]).global_step == 4
    assert resume(tmp_path / "step=2.ckpt", callbacks=[adaptive]).global_step == 4
    with pytest.raises(ValueError, match=r"corrections.adaptive_kl.horizon: 8 in the checkpoint, 9 now"):
        resume(tmp_path / "step=2.ckpt", callbacks=[AdaptiveKL(0.1, as_loss=True, horizon=9)])


def test_a_checkpoint_of_another_project_is_named(tmp_path: Path, checkpoint: Path) -> None:
    foreign = torch.load(checkpoint, weights_only=True)
    del foreign["lightning_rl"]
    torch.save(foreign, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="expected a checkpoint of an RLLightningModule to resume from"):
        resume(tmp_path / "foreign.ckpt")


@pytest.mark.parametrize(
    ("entry", "content"), [("fit", "dictionary"), ("validate", "weights"), ("test", "tensor"), ("predict", "weights")]
)
def test_a_file_that_no_trainer_wrote_is_named(entry: str, content: str, tmp_path: Path) -> None:
    weights = tiny_policy().state_dict()
    contents = {"dictionary": {"state_dict": weights}, "weights": weights, "tensor": torch.ones(1)}
    torch.save(contents[content], tmp_path / "plain.ckpt")
    trainer = a_trainer(max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"an RLLightningModule, got .*plain\.ckpt, which another program wrote: pass a file"
    ):
        getattr(trainer, entry)(tiny_module(), tiny_prompts(validation=[[2]]), ckpt_path=tmp_path / "plain.ckpt")


def test_a_checkpoint_of_another_module_is_named_by_every_entry(tmp_path: Path) -> None:
    other = a_trainer(max_steps=1, default_root_dir=tmp_path)
    other.fit(BoringModel(), DataLoader(RandomDataset(32, 2)))
    other.save_checkpoint(tmp_path / "other.ckpt")
    for entry in ("fit", "validate", "test", "predict"):
        with pytest.raises(ValueError, match="RLLightningModule to resume from or to evaluate, got one of another mod"):
            getattr(a_trainer(max_steps=1, default_root_dir=tmp_path), entry)(
                tiny_module(), tiny_prompts(validation=[[2]]), ckpt_path=tmp_path / "other.ckpt", weights_only=True
            )


def test_other_versions_are_warned_of() -> None:
    same: dict[str, Any] = {"module": {}, "corrections": {}, "data": {}, "trainer": {"precision": "32-true"}}
    with pytest.warns(UserWarning, match="torch 2.12.0 -> 2.13.0"):
        check_resume({**same, "versions": {"torch": "2.12.0"}}, {**same, "versions": {"torch": "2.13.0"}})
