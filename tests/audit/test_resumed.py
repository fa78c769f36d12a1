"""A resumed run has what its checkpoint holds; the audit names the code that loads something else."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.chats import CHAT, chat_prompts
from kit.support import a_trainer, tiny_module, tiny_policy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_rl import PromptDataModule, RLLightningModule
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.resumed import of_checkpoint
from lightning_rl.callbacks import AdaptiveKL, DynamicSampling, EntropyBonus, TruncatedIS

ROWS = [[2 + row // 6, 8 + row % 6] for row in range(32)]
PLAIN: dict[str, Any] = {
    "minibatches_per_rollout": 2,
    "optimizer": partial(AdamW, lr=1e-2),
    "lr_scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


def resume(
    folder: Path,
    first: Callable[[], list[Callback]],
    then: Callable[[], list[Callback]],
    *,
    data: type[PromptDataModule] = PromptDataModule,
    kind: type[RLLightningModule] = RLLightningModule,
    steps: int = 3,
    **options: Any,
) -> list[str]:
    """Return the culprits of a run that resumes after some optimizer steps, in the middle of a rollout if odd."""
    rows, path, audit = ROWS, folder / "half.ckpt", SignalAudit(1, checks=["resumed_state"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = a_trainer(first(), max_steps=steps, logger=False)
        trainer.fit(tiny_module(**PLAIN, **options), data(rows, 4))
        trainer.save_checkpoint(path)
        module = tiny_module(**PLAIN, **options)
        module.__class__ = kind
        trainer = a_trainer([*then(), audit], max_steps=steps + 5, max_epochs=-1, logger=False)
        trainer.fit(module, data(rows, 4), ckpt_path=path)
    return [finding.culprit for finding in audit.findings]


@pytest.mark.parametrize(
    ("callbacks", "steps", "options"),
    [
        (list, 3, {}),
        (list, 4, {"max_staleness": 1}),
        (
            lambda: [AdaptiveKL(0.1, target=0.01, as_loss=True), EntropyBonus(0.01, target=1.0)],
            3,
            {"epochs_per_rollout": 2},
        ),
        (lambda: [TruncatedIS()], 5, {"advantages": "gae", "critic": "shared"}),
        (list, 2, {"advantages": "gae", "critic": partial(tiny_policy, 1)}),
    ],
    ids=["plain", "ahead", "corrections", "critic", "separate"],
)
def test_a_resumed_run_is_silent(tmp_path: Path, callbacks: Any, steps: int, options: Any) -> None:
    assert resume(tmp_path, callbacks, callbacks, steps=steps, **options) == []


@pytest.mark.parametrize("groups", [4, 2], ids=["one round", "filtered"])
def test_conversations_of_before_a_resume_give_no_finding(tmp_path: Path, groups: int) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    chats, audit = {**CHAT, "max_staleness": 1}, SignalAudit(1, "raise")
    corrections: list[Callback] = [TruncatedIS(), *([] if groups == 4 else [DynamicSampling(max_rounds=2)])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for callbacks, steps, path in (([saves], 2, None), ([audit], 4, tmp_path / "step=1.ckpt")):
            known: dict[str, Any] = {"max_steps": steps, "enable_checkpointing": path is None}
            trainer = a_trainer([*corrections, *callbacks], **known)
            trainer.fit(tiny_module(**chats), chat_prompts(32), ckpt_path=path)
    assert audit.findings == []


class NoMoments(Callback):
    """Clears second moments when a checkpoint is loaded."""

    @override
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"][0]["state"].values():
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


class FirstStep(Callback):
    """Sets the step counts of the optimizer to 0."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["step"] = torch.zeros_like(state["step"])


class HigherRate(Callback):
    """Sets another learning rate in the schedule."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.lr_scheduler_configs[0].scheduler.base_lrs = [0.5]


class Skipped(PromptDataModule):
    """Skips a rollout."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "cursor": state_dict["cursor"] + 4})


class Unnormed(RLLightningModule):
    """Keeps norm weights at their start."""

    @override
    def load_state_dict(self, state_dict: Any, *given: Any, **named: Any) -> Any:
        return super().load_state_dict(
            {name: value if "norm" not in name else torch.ones_like(value) for name, value in state_dict.items()}
        )

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)


class Forgetful(EntropyBonus):
    """Loads nothing."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


class Stateless(EntropyBonus):
    """Saves nothing."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("callbacks", "options", "culprit"),
    [
        ([NoMoments], {}, "callback NoMoments.on_load_checkpoint"),
        ([FirstStep], {}, "callback FirstStep.on_train_start"),
        ([HigherRate], {}, "callback HigherRate.on_train_start"),
        ([], {"data": Skipped}, "data module Skipped.load_state_dict"),
        ([], {"kind": Unnormed}, "module Unnormed.load_state_dict"),
        ([partial(Forgetful, 0.01, target=1.0, step=0.01)], {}, "callback entropy_bonus.load_state_dict"),
        ([partial(Stateless, 0.01, target=1.0, step=0.01)], {}, "callback entropy_bonus.state_dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_that_a_resume_loses_is_found(tmp_path: Path, callbacks: Any, options: Any, culprit: str) -> None:
    if "entropy" in culprit:
        found = resume(tmp_path, lambda: [callbacks[0]()], lambda: [callbacks[0]()], **options)
    else:
        found = resume(tmp_path, list, lambda: [make() for make in callbacks], **options)
    assert len(found) == 1 and culprit in found[0]


def test_a_fingerprint_names_the_fields_of_the_current_rollout() -> None:
    rollout = {"rewards": torch.zeros(2), "old_logprobs": torch.zeros(2, 3)}
    states = [{"current": {"rollout": fields}} for fields in (rollout, {"rewards": rollout["rewards"]})]
    whole, without = (of_checkpoint({"lightning_rl": {"ranks": [state]}})["rollout"] for state in states)
    assert whole.keys() - without.keys() == {"old_logprobs"}
