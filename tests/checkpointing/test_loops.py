"""A StopIteration of anybody's code is an error, whatever called it, and never the end of the data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_rl import LossView, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.generation import Completion, Request


class Ends:
    """A source that runs out at a call; what is asked of it lets its StopIteration out."""

    def __init__(self, at: int) -> None:
        self.values = iter(range(at - 1))

    def __call__(self, *_: Any, **__: Any) -> None:
        """Raises StopIteration once there is nothing left."""
        next(self.values)


class Hook(Callback):
    """Asks its source in one hook of Lightning's."""

    def __init__(self, name: str, at: int) -> None:
        setattr(self, name, Ends(at))


class Watches(RLCallback):
    """Asks its source in one hook of ours, and changes nothing."""

    name = "watches"

    def __init__(self, name: str, at: int) -> None:
        self.asked, self.source = name, Ends(at)

    @property
    @override
    def affects(self) -> bool:
        return False

    def ask(self, name: str) -> None:
        """Asks in one of the hooks."""
        if name == self.asked:
            self.source()

    @override
    def observe_generated(self, pairs: Any) -> None:
        self.ask("observe_generated")

    @override
    def observe(self, rollout: Rollout) -> None:
        self.ask("observe")

    @override
    def token_mask(self, view: LossView) -> Tensor:
        self.ask("token_mask")
        return torch.ones_like(view.valid_tokens)

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return self.asked == "observe_step"

    @override
    def observe_step(self, trace: Any) -> None:
        self.ask("observe_step")

    @override
    def state_dict(self) -> dict[str, Any]:
        self.ask("state_dict")
        return {}


class Draws(TransformersEngine):
    """Asks its source when it is to draw."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.source = Ends(at)

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.source()
        return super()._draw(requests, logprobs=logprobs)


class Clears(AdamW):
    """Asks its source once its step is made."""

    def __init__(self, groups: Any, at: int) -> None:
        super().__init__(groups, lr=1e-2)
        self.source = Ends(at)

    @override
    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        if self.state:
            self.source()
        super().zero_grad(*arguments, **keywords)


def run(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Two epochs of two rollouts with two steps each and a validation at the end of each."""
    module = tiny_module(minibatches_per_rollout=2, **options)
    trainer = fit(
        module, callbacks=callbacks, data=tiny_prompts(8, 4, validation=[[2, 3]]), max_epochs=2,
        default_root_dir=folder, ckpt_path=ckpt_path, num_sanity_val_steps=0,
    )  # fmt: skip
    return module, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RLLightningModule:
    """The run in which nothing ran out."""
    return run(tmp_path_factory.mktemp("whole"))[0]


def check(start: Callable[[], Any], steps: int, folder: Path, whole: RLLightningModule) -> None:
    """The run ends loudly at a step, and goes on from there bit for bit."""
    with pytest.raises(
        RuntimeError, match=r"expected no StopIteration to leave Ends\.__call__ \(.*test_loops"
    ) as raised:
        start()
    cause = raised.value.__cause__
    assert isinstance(cause, StopIteration) or isinstance(cause and cause.__cause__, StopIteration)
    assert torch.load(folder / INTERRUPTED, weights_only=True)["global_step"] == steps
    resumed, trainer = run(folder, ckpt_path=folder / INTERRUPTED)
    assert trainer.global_step == 8
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(resumed)[name], weight), name


@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("on_train_epoch_start", 2, 4),
        ("on_train_batch_start", 4, 3),
        ("on_before_backward", 4, 3),
        ("on_after_backward", 6, 5),
        ("on_before_optimizer_step", 3, 2),
        ("on_train_batch_end", 6, 6),
        ("on_validation_start", 2, 8),
        ("on_validation_batch_start", 1, 4),
        ("on_validation_batch_end", 1, 4),
        ("on_validation_end", 1, 4),
        ("on_train_epoch_end", 1, 4),
    ],
)
def test_one_out_of_any_hook_of_a_callback_ends_the_run_with_an_error(
    hook: str, at: int, steps: int, whole: RLLightningModule, tmp_path: Path
) -> None:
    check(lambda: run(tmp_path, Hook(hook, at)), steps, tmp_path, whole)


@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("observe_generated", 2, 2), ("observe", 3, 4), ("token_mask", 4, 3), ("observe_step", 3, 3),
        ("state_dict", 10, 4),
    ],
)  # fmt: skip
def test_one_out_of_any_hook_of_a_correction_does_so(
    hook: str, at: int, steps: int, whole: RLLightningModule, tmp_path: Path
) -> None:
    check(lambda: run(tmp_path, Watches(hook, at)), steps, tmp_path, whole)


def test_one_out_of_an_engine_does_so(whole: RLLightningModule, tmp_path: Path) -> None:
    check(lambda: run(tmp_path, engine=Draws(2)), 2, tmp_path, whole)


def test_one_out_of_an_optimizer_or_a_scheduler_does_so(whole: RLLightningModule, tmp_path: Path) -> None:
    for folder, options in {
        "optimizer": {"optimizer": lambda groups: Clears(groups, 3)},
        "scheduler": {"lr_scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: Ends(2 - step // 3)() or 1.0)},
    }.items():
        with pytest.raises(RuntimeError, match=r"expected no StopIteration to leave Ends\.__call__"):
            run(tmp_path / folder, **options)


def test_one_out_of_a_loss_does_so(tmp_path: Path) -> None:
    source = Ends(3)

    def loss(view: LossView) -> Tensor:
        source()
        return -view.logprobs

    with pytest.raises(RuntimeError, match=r"expected no StopIteration to leave Ends\.__call__"):
        run(tmp_path, loss=loss)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 2


def test_one_in_an_evaluation_or_a_prediction_is_an_error_too(tmp_path: Path) -> None:
    module, data = tiny_module(), tiny_prompts(validation=[[2, 3]])
    for stage, hook in (("validate", "on_validation_batch_end"), ("predict", "on_predict_batch_start")):
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=tmp_path, callbacks=[Hook(hook, 1)],
        )  # fmt: skip
        with pytest.raises(RuntimeError, match=r"expected no StopIteration to leave Ends\.__call__"):
            getattr(trainer, stage)(module, data)


def test_a_hook_that_leaves_out_the_rest_of_an_epoch_still_does(tmp_path: Path) -> None:
    class Leaves(RLLightningModule):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.global_step == 2 else super().on_train_batch_start(batch, batch_idx)

    module = Leaves(**tiny_module(minibatches_per_rollout=2).options)
    assert fit(module, data=tiny_prompts(8, 4), default_root_dir=tmp_path).global_step == 2
