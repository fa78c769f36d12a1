"""Overrides of Lightning's hooks in subclasses: with and without ``super()`` the run is the same."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import differing, fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import PromptDataModule, RLLightningModule
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.utils.library_hooks import LibraryHooks

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning", "ignore:.*exists and is not empty:UserWarning"
)
STAGES = "validation", "test", "predict"
KEPT = [
    *("setup", "configure_callbacks", "configure_model", "on_fit_start", "on_train_start", "on_train_batch_start"),
    *("on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint", "teardown"),
    *(f"on_{stage}_epoch_{end}" for stage in STAGES for end in ("start", "end")),
]
REFUSED = [
    *("configure_optimizers", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
    *("configure_gradient_clipping", "forward", "train_dataloader", "val_dataloader", "test_dataloader"),
    "predict_dataloader",
]


def overriding(name: str, calls: list[str], base: type = RLLightningModule, *, by_super: bool = False) -> Any:
    """A subclass that overrides a hook and notes its calls."""
    made: Any

    def hook(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(name)

    def hook_with_super(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return getattr(super(made, self), name)(*arguments, **keywords)  # pyrefly: ignore[invalid-argument]

    made = type("Overriding", (base,), {name: hook_with_super if by_super else hook})
    return made


def run(kind: Any, folder: Path, *, resume: bool = True) -> tuple[RLLightningModule, dict[str, float]]:
    """A fit that validates, is resumed in the middle of a rollout, is tested and predicts."""
    options = tiny_module(minibatches_per_rollout=2).options
    data = tiny_prompts(16, 4, validation=[[2, 3], [5]])
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    corrections = [NoEOSMask(), ReferenceKL(0.1, as_loss=True)]
    given: dict[str, Any] = {"val_check_interval": 2, "enable_checkpointing": True, "default_root_dir": folder}
    module = kind(**options)
    trainer = fit(module, callbacks=[*corrections, saver], data=data, **given)
    seen = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    if resume:
        module = kind(**options)
        given |= {"ckpt_path": folder / "step=3.ckpt"}
        trainer = fit(module, callbacks=[NoEOSMask(), ReferenceKL(0.1, as_loss=True), saver], data=data, **given)
        assert trainer.test(module, datamodule=data, verbose=False)[0]
        assert trainer.predict(module, datamodule=data)
    return module, seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLLightningModule, dict[str, float]]:
    return run(RLLightningModule, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("name", "by_super"),
    [*((name, False) for name in KEPT), ("setup", True), ("configure_callbacks", True), ("teardown", True)],
)
def test_a_subclass_that_overrides_a_hook_trains_the_same(
    name: str, by_super: bool, plain: tuple[RLLightningModule, dict[str, float]], tmp_path: Path
) -> None:
    calls: list[str] = []
    module, seen = run(overriding(name, calls, by_super=by_super), tmp_path)
    assert calls and not differing(module, plain[0])
    assert seen == plain[1] and seen


def test_the_rules_name_every_hook_of_the_library() -> None:
    hooks: LibraryHooks = RLLightningModule.library_hooks  # pyrefly: ignore[missing-attribute]
    assert {*hooks.rules} == {*KEPT, "backward", "training_step", *(f"{stage}_step" for stage in STAGES)}
    assert {*hooks.refused} == {*REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_an_override_without_effect_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"expected Overriding without {name}, .*: \w+"):
        overriding(name, [], by_super=True)(**tiny_module().options)


@pytest.mark.parametrize("name", ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"])
def test_a_data_module_with_loaders_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"without {name}"):
        overriding(name, [], PromptDataModule)([[1], [2]], 2)


@pytest.mark.parametrize("name", ["backward", "training_step", "validation_step", "test_step", "predict_step"])
def test_a_step_without_super_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} to call super\(\)"):
        overriding(name, [])(**tiny_module().options)


@pytest.mark.parametrize("base", [RLLightningModule, PromptDataModule])
def test_a_constructor_without_super_is_refused(base: Any) -> None:
    with pytest.raises(ValueError, match=rf"Mine.__init__ to call super\(\).__init__\(.*arguments of {base.__name__}"):
        type("Mine", (base,), {"__init__": lambda self: setattr(self, "mine", 1)})


def test_a_backward_of_its_own_is_refused_and_one_with_super_trains() -> None:
    class Own(RLLightningModule):
        @override
        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward()

    class Extended(RLLightningModule):
        @override
        def backward(self, loss: Tensor, *arguments: Any, **keywords: Any) -> None:
            super().backward(loss, *arguments, **keywords)

    with pytest.raises(ValueError, match=r"expected Own.backward to call super\(\).backward"):
        Own(**tiny_module().options)
    module, plain = Extended(**tiny_module().options), tiny_module()
    fit(module)
    fit(plain)
    assert not differing(module, plain)


def test_a_step_that_leaves_super_out_at_times_fails(tmp_path: Path) -> None:
    class Skips(RLLightningModule):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return super().training_step(batch, batch_idx) if batch_idx != 1 else {}

    with pytest.raises(RuntimeError, match=r"expected Skips.training_step to call super\(\).training_step"):
        fit(Skips(**tiny_module(minibatches_per_rollout=2).options))


def test_a_hook_of_a_mixin_and_of_a_parent_is_kept_once() -> None:
    calls: list[str] = []

    class Mixin:
        def on_train_start(self) -> None:
            calls.append("mixin")

    class First(Mixin, RLLightningModule):
        pass

    class Second(First):
        @override
        def on_train_start(self) -> None:
            calls.append("second")
            super().on_train_start()

    module = Second(**tiny_module().options)
    trainer = fit(module)
    assert calls == ["second", "mixin"] and trainer.global_step
    explicit: list[int] = []

    class Explicit(RLLightningModule):
        @override
        def setup(self, stage: str) -> None:
            explicit.append(len(self.run.corrections.callbacks))
            RLLightningModule.setup(self, stage)
            explicit.append(len(self.run.corrections.callbacks))

    fit(Explicit(**tiny_module().options), callbacks=[NoEOSMask()])
    assert explicit == [0, 1]


def test_hooks_of_the_library_run_before_those_of_a_subclass_that_read_their_results() -> None:
    read: dict[str, Any] = {}

    class Reads(RLLightningModule):
        @override
        def setup(self, stage: str) -> None:
            read["corrections"] = len(self.run.corrections.callbacks)

        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert self.run.progress.current is not None
            read["rollout"] = self.run.progress.current.number

        @override
        def configure_callbacks(self) -> list[Callback]:
            return [NoEOSMask()]

    fit(Reads(**tiny_module().options), max_steps=2)
    assert read == {"corrections": 1, "rollout": 1}


def test_gradients_before_the_optimizer_step_are_not_clipped() -> None:
    seen: list[float] = []

    class Norms(RLLightningModule):
        @override
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [one.grad for one in self.parameters() if one.grad is not None]
            seen.append(float(torch.nn.utils.get_total_norm(grads)))

    class Same(Callback):
        @override
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            grads = [one.grad for one in pl_module.parameters() if one.grad is not None]
            seen.append(float(torch.nn.utils.get_total_norm(grads)))

    module = Norms(**tiny_module(max_grad_norm=1e-3).options)
    trainer = fit(module, callbacks=[Same()], max_steps=1)
    assert seen[0] == seen[1] > 1e-2
    assert trainer.callback_metrics["optim/grad_norm"] == pytest.approx(seen[0])


def test_a_data_module_that_overrides_its_state_resumes_the_same(tmp_path: Path) -> None:
    class Mine(PromptDataModule):
        loaded: Any = None

        @override
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 3}

        @override
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            Mine.loaded = state_dict["mine"]

        @override
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    modules = []
    for kind in (PromptDataModule, Mine):
        folder = tmp_path / kind.__name__
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        prompts = [[i % 7 + 1, i % 5 + 1] for i in range(16)]
        for path in (None, folder / "step=2.ckpt"):
            module = tiny_module()
            given: dict[str, Any] = {"ckpt_path": path, "max_steps": 4, "enable_checkpointing": True}
            fit(module, data=kind(prompts, 4), callbacks=[saver], default_root_dir=folder, **given)
        modules.append(module)
    assert not differing(*modules) and Mine.loaded == 3


def test_an_optimizer_that_ignores_its_closure_gets_the_clipped_gradient() -> None:
    norms: list[float] = []
    calls: list[str] = []

    class Ignores(SGD):
        @override
        def step(self, closure: Any = None) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in self.param_groups[0]["params"]])))

    kind = overriding("on_before_optimizer_step", calls)
    fit(kind(**tiny_module(max_grad_norm=1e-3, optimizer=partial(Ignores, lr=0.1)).options), max_steps=2)
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3) and len(calls) == 2
