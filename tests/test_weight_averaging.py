"""Averaged weights: what a validation evaluates, what the engine holds, what a fit leaves and a resume finds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_rl import TransformersEngine
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.generation import Completion, Request
from lightning_rl.setup_checks import check_flags

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback"),
    pytest.mark.filterwarnings("ignore:.*pre-optimization state.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

DECAY = 0.5
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@dataclass
class Seen:
    """One weight of the policy: after each optimizer step, and whenever the engine drew tokens."""

    steps: list[Tensor] = field(default_factory=list)
    rollouts: list[Tensor] = field(default_factory=list)
    validations: list[Tensor] = field(default_factory=list)


class SeeingEngine(TransformersEngine):
    """The embedded engine, which notes the weight that it draws with; greedy requests are validations here."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(canary=None)  # or it would draw as well
        self.seen = seen

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        weight = dict(self._model_for("generate").named_parameters())[WEIGHT].detach().clone()
        greedy = requests[0].sampling.temperature == 0
        (self.seen.validations if greedy else self.seen.rollouts).append(weight)
        return super().generate_batch(requests, logprobs=logprobs)


class StepWeights(Callback):
    """Notes the weight after each optimizer step."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.steps.append(dict(pl_module.policy.model.named_parameters())[WEIGHT].detach().clone())


def watch_fit(*callbacks: Callback, max_staleness: int = 0, **options: Any) -> tuple[Seen, Any]:
    """A fit of four rollouts with a validation after every second."""
    seen = Seen()
    module = tiny_module(engine=SeeingEngine(seen), max_staleness=max_staleness)
    data = tiny_prompts(16, 4, validation=[[2, 3], [5]])
    defaults: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    fit(module, callbacks=[StepWeights(seen), *callbacks], data=data, **{**defaults, **options})
    return seen, module


def averages(weights: Sequence[Tensor]) -> list[Tensor]:
    """The moving average after each step: the first weights, then half of what came before."""
    found = [weights[0]]
    for weight in weights[1:]:
        found.append(found[-1] + (weight - found[-1]) * (1 - DECAY))
    return found


@pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples")
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_validation_evaluates_the_average_and_rollouts_come_from_the_policy(max_staleness: int) -> None:
    seen, module = watch_fit(EMAWeightAveraging(decay=DECAY), max_staleness=max_staleness)
    average = averages(seen.steps)
    assert len(seen.validations) == 2
    torch.testing.assert_close(seen.validations[0], average[1])
    torch.testing.assert_close(seen.validations[1], average[3])
    assert not torch.allclose(average[3], seen.steps[3], atol=1e-4)
    torch.testing.assert_close(weights_of(module)[f"policy.model.{WEIGHT}"], average[3])  # what the fit leaves


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples")
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_average_changes_nothing_of_the_training(max_staleness: int) -> None:
    seen, _ = watch_fit(EMAWeightAveraging(decay=DECAY), max_staleness=max_staleness)
    plain, _ = watch_fit(max_staleness=max_staleness)
    assert torch.equal(torch.stack(seen.steps), torch.stack(plain.steps))
    assert torch.equal(torch.stack(seen.rollouts), torch.stack(plain.rollouts))
    assert not torch.equal(torch.stack(seen.validations), torch.stack(plain.validations))


def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> tuple[Seen, Any]:
        saving = ModelCheckpoint(dirpath=tmp_path / folder, every_n_train_steps=2, save_top_k=-1)
        return watch_fit(EMAWeightAveraging(decay=DECAY), saving, enable_checkpointing=True, **options)

    whole, module = run("whole")
    resumed, other = run("resumed", ckpt_path=tmp_path / "whole" / "epoch=0-step=2.ckpt")
    assert torch.equal(torch.stack(resumed.steps), torch.stack(whole.steps[2:]))
    for name, weight in weights_of(module).items():
        assert torch.equal(weights_of(other)[name], weight), name


def test_a_checkpoint_holds_the_average_in_the_place_of_the_policy(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4)
    seen, _ = watch_fit(EMAWeightAveraging(decay=DECAY), saving, enable_checkpointing=True)
    checkpoint = torch.load(tmp_path / "epoch=0-step=4.ckpt", weights_only=True)
    torch.testing.assert_close(checkpoint["state_dict"][f"policy.model.{WEIGHT}"], averages(seen.steps)[3])
    assert torch.equal(checkpoint["current_model_state"][f"policy.model.{WEIGHT}"], seen.steps[3])


def test_stochastic_weight_averaging_is_refused() -> None:
    with pytest.raises(ValueError, match="expected Trainer without StochasticWeightAveraging, which"):
        fit(tiny_module(), callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])


def test_a_reference_is_the_policy_before_its_first_step_and_never_the_average() -> None:
    seen, module = watch_fit(WeightAveraging(), ReferenceKL(0.1, as_loss=True))
    assert torch.equal(dict(module.models.reference.model.named_parameters())[WEIGHT], seen.rollouts[0])


def test_an_average_of_sharded_weights_is_refused() -> None:
    sharded = ModelParallelStrategy()
    trainer = Trainer(
        accelerator="cpu", strategy=sharded, logger=False, enable_checkpointing=False, callbacks=[EMAWeightAveraging()]
    )
    with pytest.raises(ValueError, match="expected Trainer without EMAWeightAveraging under a strategy that shards"):
        check_flags(trainer)
