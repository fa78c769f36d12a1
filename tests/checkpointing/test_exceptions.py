"""After an exception between two optimizer steps, the checkpoint resumes from the last one, bit for bit."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_rl import Engine, LossView, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.callbacks import AdaptiveKL, DynamicSampling, EntropyBonus
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.checkpointing.checkpoint_folder import LOCK, RunFolder
from lightning_rl.generation import Completion, Request


def alternating(prompts: Sequence[Any], *_: Any, **__: Any) -> list[float]:
    return [float(number % 2) for number in range(len(prompts))]


class SomeError(Exception):
    """Error of user code."""


class Fails(RLCallback):
    """Raises in one of its hooks, at a call of it; asked for nothing, it changes nothing."""

    name = "fails"

    def __init__(self, hook: str = "", at: int = 0, error: BaseException | None = None) -> None:
        self.hook, self.left, self.error = hook, at, error or SomeError("at " + hook)

    @property
    @override
    def affects(self) -> bool:
        return False

    def come(self, hook: str) -> None:
        """Raises if it is time."""
        if hook == self.hook:
            self.left -= 1
            if not self.left:
                raise self.error

    @override
    def observe_generated(self, pairs: Any) -> None:
        self.come("observe_generated")

    @override
    def observe(self, rollout: Rollout) -> None:
        self.come("observe")

    @override
    def token_mask(self, view: LossView) -> Tensor:
        self.come("token_mask")
        return torch.ones_like(view.valid_tokens)

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        return self.hook == "observe_step"

    @override
    def observe_step(self, trace: Any) -> None:
        self.come("observe_step")

    @override
    def on_train_batch_start(self, *arguments: Any, **keywords: Any) -> None:
        self.come("on_train_batch_start")

    @override
    def on_after_backward(self, *arguments: Any, **keywords: Any) -> None:
        self.come("on_after_backward")

    @override
    def on_before_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        self.come("on_before_optimizer_step")

    @override
    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        self.come("on_train_batch_end")

    @override
    def on_validation_start(self, *arguments: Any, **keywords: Any) -> None:
        self.come("on_validation_start")


class Breaks(TransformersEngine):
    """Raises at its n-th call."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = at, error

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.left -= 1
        if not self.left:
            raise self.error
        return super().generate_batch(requests, logprobs=logprobs)


def run(
    folder: Path, fault: Callback | None = None, *, engine: Engine | None = None, ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[RLLightningModule, Trainer]:  # fmt: skip
    """Two epochs of two rollouts with four steps each, under corrections that have a state and refills."""
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, engine=engine, **options)
    return module, train(module, folder, fault if isinstance(fault, Fails) else Fails(), ckpt_path=ckpt_path)


def start(folder: Path, *callbacks: Callback, engine: Engine | None = None, **flags: Any) -> Trainer:
    """The same with further callbacks and flags of the Trainer."""
    return train(
        tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, engine=engine),
        folder,
        Fails(),
        *callbacks,
        **flags,
    )


def train(module: RLLightningModule, folder: Path, *callbacks: Callback, **flags: Any) -> Trainer:
    """Trains a module under corrections, with more callbacks."""
    adapting = [AdaptiveKL(0.05, as_loss=True, horizon=20), EntropyBonus(0.02, target=2.2, step=0.01)]
    shape: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    return fit(
        module, callbacks=[DynamicSampling(), *adapting, *callbacks], data=tiny_prompts(8, 4, validation=[[2, 3]]),
        default_root_dir=folder, num_sanity_val_steps=0, **{**shape, **flags},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RLLightningModule:
    """The run that was never interrupted."""
    return run(tmp_path_factory.mktemp("whole"))[0]


def assert_equal(resumed: RLLightningModule, whole: RLLightningModule) -> None:
    differing = [
        name for name, weight in weights_of(whole).items() if not torch.equal(weight, weights_of(resumed)[name])
    ]
    assert differing == []
    one, other = (module.run.corrections.callbacks for module in (resumed, whole))
    assert [callback.state_dict() for callback in one] == [callback.state_dict() for callback in other]


@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("on_train_batch_start", 6, 5),
        ("observe_generated", 3, 4),
        ("observe", 2, 4),
        ("token_mask", 7, 6),
        ("on_after_backward", 8, 7),
        ("on_before_optimizer_step", 3, 2),
        ("observe_step", 6, 6),
        ("observe_step", 8, 8),
        ("on_train_batch_end", 7, 7),
        ("on_validation_start", 2, 4),
    ],
)
def test_an_error_at_any_place_leaves_the_last_step(
    hook: str, at: int, steps: int, whole: RLLightningModule, tmp_path: Path
) -> None:
    with pytest.raises(SomeError):
        run(tmp_path, Fails(hook, at))
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == steps
    resumed, trainer = run(tmp_path, ckpt_path=tmp_path / INTERRUPTED)
    assert trainer.global_step == 16
    assert_equal(resumed, whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("no room for 8 GiB"), torch.OutOfMemoryError),
        (RuntimeError("the engine has no idea"), RuntimeError),
        (KeyboardInterrupt(), SystemExit),
        (SystemExit(3), SystemExit),
    ],
    ids=["out-of-memory", "RuntimeError", "KeyboardInterrupt", "SystemExit"],
)
def test_whatever_the_engine_raises_leaves_the_last_step(
    error: BaseException, raised: type[BaseException], whole: RLLightningModule, tmp_path: Path
) -> None:
    with pytest.raises(raised):
        run(tmp_path, engine=Breaks(6, error))
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] in (4, 8)
    assert_equal(run(tmp_path, ckpt_path=tmp_path / INTERRUPTED)[0], whole)


@pytest.mark.nightly
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("at", [5, 7])
def test_a_checkpoint_within_a_step_holds_the_last_one(
    hook: str, at: int, whole: RLLightningModule, tmp_path: Path
) -> None:
    class Saves(Callback):
        def __init__(self) -> None:
            self.left = at
            setattr(self, hook, self.save)

        def save(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            self.left -= 1
            if not self.left:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    start(tmp_path, Saves())
    saved = torch.load(tmp_path / "within.ckpt", weights_only=True)
    assert saved["global_step"] == saved["PromptDataModule"]["step_index"] == at - 1
    resumed, trainer = run(tmp_path, ckpt_path=tmp_path / "within.ckpt")
    assert trainer.global_step == 16
    assert_equal(resumed, whole)


def test_an_error_inside_the_optimizer_step_saves_nothing_and_says_so(tmp_path: Path) -> None:
    class Half(torch.optim.AdamW):
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            if self.state and len(next(iter(self.state.values()))) and float(self.steps()) >= 3:
                assert closure is not None
                closure()
                next(iter(self.param_groups[0]["params"])).data.add_(1.0)
                raise SomeError("half a step")
            return super().step(closure)

        def steps(self) -> Tensor:
            return next(iter(self.state.values()))["step"]

    with pytest.raises(SomeError, match="half a step") as raised:
        run(tmp_path, optimizer=lambda groups: Half(groups, lr=1e-2))
    note = (
        "no interrupted.ckpt was written: the error came in the middle of an optimizer step; resume from the last check"
    )
    assert raised.value.__notes__[-1].startswith(note)
    assert not (tmp_path / INTERRUPTED).exists()


def test_a_checkpoint_leaves_out_a_rollout_that_is_used_up(tmp_path: Path) -> None:
    with pytest.raises(SomeError):
        run(tmp_path, Fails("observe_step", 4))
    (ours,) = torch.load(tmp_path / INTERRUPTED, weights_only=True)["lightning_rl"]["ranks"]
    assert ours["current"] is None and ours["failure"] is None


def test_a_rollout_that_somebody_edited_is_not_saved(tmp_path: Path) -> None:
    class Edits(RLCallback):
        name = "edits"

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == 2:
                pl_module.run.progress.current.rollout.rewards.add_(1.0)

    with pytest.raises(RuntimeError, match="was written to in place") as raised:
        fit(
            tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2), callbacks=[Edits()], default_root_dir=tmp_path
        )
    assert raised.value.__notes__[-1].startswith("no interrupted.ckpt was written: the held rollout was written to in")
    assert not (tmp_path / INTERRUPTED).exists()


def test_half_a_gradient_does_not_enter_a_later_fit(whole: RLLightningModule, tmp_path: Path) -> None:
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2)
    with pytest.raises(SomeError):
        fit(module, callbacks=[Fails("on_after_backward", 1)], default_root_dir=tmp_path)
    assert all(parameter.grad is None for parameter in module.required_policy.parameters())


def test_a_rollout_that_fails_at_every_resume_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    class Poison(RLCallback):
        """Cannot stand the second rollout."""

        name = "poison"

        @property
        @override
        def affects(self) -> bool:
            return False

        @override
        def observe(self, rollout: Rollout) -> None:
            if 4 in rollout.groups:
                raise SomeError("rollout 1 is bad")

    seen: list[list[int]] = []

    class Sees(RLCallback):
        name = "sees"

        @override
        def observe(self, rollout: Rollout) -> None:
            seen.append(sorted(set(rollout.groups.tolist())))

    def start(ckpt_path: Path | None = None, **options: Any) -> Trainer:
        return fit(
            tiny_module(minibatches_per_rollout=2, **options), callbacks=[Sees(), Poison()], data=tiny_prompts(12, 4),
            default_root_dir=tmp_path, ckpt_path=ckpt_path,
        )  # fmt: skip

    again = "failed in 1 of 1 attempts", "failed in 2 of 2 attempts"
    for number, ckpt_path in enumerate((None, tmp_path / INTERRUPTED)):
        with pytest.raises(SomeError) as raised:
            start(ckpt_path)
        said = "".join(traceback.format_exception(raised.value))
        assert again[number] in said and ("skip_rollouts=[1]" in said) == (number == 1), "not before it came back"
    seen.clear()
    trainer = start(tmp_path / INTERRUPTED, skip_rollouts=[1])
    assert seen == [[8, 9, 10, 11]] and trainer.global_step == 4, (
        "the rollout after it has the prompts that it always had"
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_skipped_rollout_leaves_the_prompts_of_the_others_alone(staleness: int) -> None:
    seen: list[list[int]] = []

    class Sees(RLCallback):
        name = "sees"

        @override
        def observe(self, rollout: Rollout) -> None:
            seen.append(sorted(set(rollout.groups.tolist())))

    options: dict[str, Any] = {"max_staleness": staleness, "loss": "reinforce"} if staleness else {}
    with pytest.warns(UserWarning, match="nothing corrects") if staleness else nullcontext():
        fit(tiny_module(skip_rollouts=[0, 2], **options), callbacks=[Sees()], data=tiny_prompts(16, 4))
    assert seen == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_gradients_that_are_not_finite_end_the_run_with_the_rollout_in_a_file(tmp_path: Path) -> None:
    class Poison(RLCallback):
        """Gives one row's tokens an infinite weight, from the second rollout on."""

        name = "poison"

        @override
        def token_weight(self, view: LossView) -> Tensor:
            bad = (view.groups == 5) & (view.sample_ids % 4 == 2)
            return torch.where(bad[:, None], torch.inf, 1.0).expand(view.logprobs.shape)

    def rare(prompts: Any, completions: Any, **_: Any) -> list[float | None]:
        """Applies to a few rows, so that the others have no number, which is nothing wrong."""
        return [None if row % 4 == 1 else 1.0 for row in range(len(completions))]

    rewards = {"alternating": alternating, "rare": (rare, 0.0)}
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row") as raised:
        fit(tiny_module(epochs_per_rollout=4, rewards=rewards), callbacks=[Poison()], data=tiny_prompts(8, 4),
            default_root_dir=tmp_path)  # fmt: skip
    path = tmp_path / "nonfinite" / "rollout-1-rank-0.pt"
    assert str(path) in str(raised.value) and "of rollout 1 rows" in str(raised.value)
    assert "have a loss that is not finite (loss/policy)" in str(raised.value)
    recorded = torch.load(path, weights_only=True)
    assert recorded["number"] == 1 and 6 in recorded["suspects"]
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["lightning_rl"]["ranks"][0]["nonfinite_in_a_row"] == 2


class At(Callback):
    """Raises in one hook of Lightning's, at a call of it."""

    def __init__(self, hook: str, at: int = 1, error: BaseException | None = None) -> None:
        self.left, self.error = at, error or SomeError("at " + hook)
        setattr(self, hook, self.come)

    def come(self, *_: Any, **__: Any) -> Any:
        """Raises if it is time."""
        self.left -= 1
        if not self.left:
            raise self.error
        return {}


class Finalizes(CSVLogger):
    """Cannot write its last lines."""

    @override
    def finalize(self, status: str) -> None:
        if status == "success":
            raise SomeError("the logger cannot write")


def assert_goes_on(folder: Path, steps: int, whole: RLLightningModule) -> None:
    assert torch.load(folder / INTERRUPTED, weights_only=True)["global_step"] == steps
    resumed, trainer = run(folder, ckpt_path=folder / INTERRUPTED)
    assert trainer.global_step == 16
    assert_equal(resumed, whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    [
        ("on_train_epoch_start", 2, 8),
        ("on_train_epoch_end", 1, 8),
        ("on_train_end", 1, 16),
        ("on_fit_end", 1, 16),
        ("teardown", 1, 16),
    ],
)
def test_an_error_between_epochs_or_after_the_last_step_leaves_it(
    hook: str, at: int, steps: int, whole: RLLightningModule, tmp_path: Path
) -> None:
    with pytest.raises(SomeError):
        start(tmp_path, At(hook, at))
    assert_goes_on(tmp_path, steps, whole)


def test_an_error_after_the_end_of_a_fit_leaves_it_for_a_longer_one(whole: RLLightningModule, tmp_path: Path) -> None:
    with pytest.raises(SomeError):
        start(tmp_path, At("on_fit_end"), max_epochs=1)
    assert_goes_on(tmp_path, 8, whole)


def test_a_logger_that_cannot_write_its_last_lines_leaves_the_last_step(
    whole: RLLightningModule, tmp_path: Path
) -> None:
    with pytest.raises(SomeError, match="the logger cannot write"):
        start(tmp_path, logger=Finalizes(tmp_path))
    assert_goes_on(tmp_path, 16, whole)


@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_an_error_of_the_scheduler_saves_no_half_step(tmp_path: Path) -> None:
    with pytest.raises(SomeError) as raised:
        run(tmp_path, lr_scheduler=partial(Falls, at=5))
    assert "in the middle of an optimizer step" in "".join(raised.value.__notes__)
    assert not (tmp_path / INTERRUPTED).exists()


class Falls(LambdaLR):
    """Raises in the midst of a step, once it has counted it."""

    def __init__(self, optimizer: torch.optim.Optimizer, at: int) -> None:
        self.at = at
        super().__init__(optimizer, lambda step: 0.8**step)

    @override
    def get_lr(self) -> list[Any]:
        if self.last_epoch == self.at:
            self.optimizer.param_groups[0]["lr"] = 1e3
            raise SomeError
        return super().get_lr()


def test_an_error_of_zero_grad_leaves_the_step(tmp_path: Path) -> None:
    class Keeps(torch.optim.AdamW):
        raises = True

        def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
            if self.raises and self.state and int(next(iter(self.state.values()))["step"]) == 3:
                raise SomeError
            super().zero_grad(*arguments, **keywords)

    whole, _ = run(tmp_path, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    with pytest.raises(SomeError):
        run(tmp_path, optimizer=partial(Keeps, lr=1e-2))
    Keeps.raises = False
    resumed, _ = run(tmp_path, optimizer=partial(Keeps, lr=1e-2), ckpt_path=tmp_path / INTERRUPTED)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 3
    assert_equal(resumed, whole)


def test_another_callback_that_raises_in_on_exception_costs_no_step(whole: RLLightningModule, tmp_path: Path) -> None:
    with pytest.raises(SomeError, match="at on_exception"):
        start(tmp_path, At("on_train_batch_end", 7), At("on_exception"))
    assert_goes_on(tmp_path, 7, whole)


def test_a_callback_whose_state_cannot_be_saved_is_named_in_a_note(tmp_path: Path) -> None:
    with pytest.raises(SomeError, match="at on_train_batch_end") as ended:
        start(tmp_path, At("on_train_batch_end", 7), At("state_dict"))
    note = "no interrupted.ckpt was written: SomeError: at state_dict; resume from the last checkpoint"
    assert ended.value.__notes__[-1] == note and not (tmp_path / INTERRUPTED).exists()


def test_an_error_of_another_callback_on_the_way_out_gives_the_folder_free(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", save_last=True)
    with pytest.raises(SomeError, match="at on_exception"):
        start(tmp_path, At("on_train_batch_end", 7), At("on_exception"), saver, enable_checkpointing=True)
    assert (tmp_path / "kept" / INTERRUPTED).exists() and not (tmp_path / "kept" / LOCK).exists()
    folder = RunFolder(tmp_path / "kept")
    with pytest.warns(UserWarning, match="holds checkpoints of another run"):
        folder.claim("another")
    folder.release()


def test_an_error_while_the_engine_is_closed_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    class Open(TransformersEngine):
        def close(self) -> None:
            super().close()
            raise SomeError

    with pytest.raises(KeyError) as raised:
        start(tmp_path, At("on_train_batch_end", 3, KeyError("batch")), engine=Open())
    assert raised.value.__notes__[-1] == "the engine could not be closed: SomeError"


def test_a_failure_without_words_is_named(tmp_path: Path) -> None:
    class Mute(RLLightningModule):
        @override
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise SomeError

    module = Mute(**tiny_module(minibatches_per_rollout=2).options)
    with pytest.raises(SomeError, match="at on_train_batch_end") as raised:
        fit(module, callbacks=[At("on_train_batch_end")], default_root_dir=tmp_path)
    assert raised.value.__notes__[-1] == "no interrupted.ckpt was written: SomeError; resume from the last checkpoint"


def test_a_run_that_went_on_from_an_epochs_end_ends_bitwise_equal(whole: RLLightningModule, tmp_path: Path) -> None:
    class Saves(Callback):
        @override
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "epoch.ckpt")

    start(tmp_path, Saves(), max_epochs=1)
    assert_equal(run(tmp_path, ckpt_path=tmp_path / "epoch.ckpt")[0], whole)
