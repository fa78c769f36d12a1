"""A StopIteration of user code is an error, and not the end of the data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import LossView, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.generation import Completion, Request

NAMED = r"expected no StopIteration to leave Ends\.__call__ \(.*test_stop_iteration"


class Ends:
    """Source that is exhausted at its n-th call."""

    def __init__(self, at: int) -> None:
        self.values = iter(range(at - 1))

    def __call__(self, *_: Any, **__: Any) -> None:
        """Raise StopIteration if nothing is left."""
        next(self.values)


class Watches(RLCallback):
    """Reads from a source when it observes a rollout."""

    name = "watches"

    def __init__(self, at: int) -> None:
        self.source = Ends(at)

    @override
    def observe(self, rollout: Rollout) -> None:
        self.source()


class Draws(TransformersEngine):
    """Reads from a source in each call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.source = Ends(at)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.source()
        return super().generate_batch(requests, logprobs=logprobs)


class Clears(AdamW):
    """Reads from a source after each step."""

    def __init__(self, groups: Any, at: int) -> None:
        super().__init__(groups, lr=1e-2)
        self.source = Ends(at)

    @override
    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        if self.state:
            self.source()
        super().zero_grad(*arguments, **keywords)


def run(folder: Path, *callbacks: Callback, **options: Any) -> None:
    """Train two epochs of two rollouts with two steps each and a validation at the end of each."""
    fit(
        tiny_module(minibatches_per_rollout=2, **options), callbacks=callbacks,
        data=tiny_prompts(8, 4, validation=[[2, 3]]), max_epochs=2, default_root_dir=folder, num_sanity_val_steps=0,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("start", "steps"),
    [
        (lambda folder: run(folder, Watches(3)), 4),
        (lambda folder: run(folder, engine=Draws(2)), 2),
        (lambda folder: run(folder, engine=Draws(3)), 4),
    ],
    ids=["callback", "engine", "engine in validation"],
)
def test_a_run_ends_with_an_error_and_the_checkpoint_of_its_last_step(
    start: Callable[[Path], Any], steps: int, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=rf"{NAMED}|generator raised StopIteration"):
        start(tmp_path)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == steps


@pytest.mark.parametrize("part", ["optimizer", "loss"])
def test_optimizers_and_losses_are_named(part: str, tmp_path: Path) -> None:
    source = Ends(3)

    def loss(view: LossView) -> Tensor:
        source()
        return -view.logprobs

    options: dict[str, Any] = {
        "optimizer": {"optimizer": lambda groups: Clears(groups, 3)},
        "loss": {"loss": loss},
    }[part]
    with pytest.raises(RuntimeError, match=NAMED):
        run(tmp_path, **options)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == {"loss": 2}.get(part, 3)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_ends_with_an_error(stage: str, tmp_path: Path) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    with pytest.raises(RuntimeError, match=NAMED):
        getattr(trainer, stage)(tiny_module(engine=Draws(1)), tiny_prompts(validation=[[2, 3]]))


def test_a_hook_may_end_an_epoch_by_its_return_value(tmp_path: Path) -> None:
    class Leaves(RLLightningModule):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.global_step == 2 else super().on_train_batch_start(batch, batch_idx)

    module = Leaves(**tiny_module(minibatches_per_rollout=2).options)
    assert fit(module, data=tiny_prompts(8, 4), default_root_dir=tmp_path).global_step == 2
