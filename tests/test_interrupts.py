"""Signals and exceptions: a checkpoint at a step's end, engines closed, nothing left running."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl import Engine, EngineError, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.callbacks import DynamicSampling
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.engine import EngineState


class Signals(RLCallback):
    """Sends a signal to this process while a rollout is drawn."""

    name = "signals"

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at, self.seen = number, at, 0

    @override
    def observe(self, rollout: Rollout) -> None:
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), self.number)


class Fails(RLCallback):
    """Raises in the middle of the run."""

    name = "fails"

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("something else")


def module_of(**options: Any) -> RLLightningModule:
    return tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, **options)


@pytest.mark.parametrize(
    ("number", "ending", "code"),
    [(signal.SIGINT, SystemExit, 1), (signal.SIGTERM, SIGTERMException, 143)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_saves_at_the_end_of_the_step_and_the_run_goes_on_from_there(
    number: int, ending: type[SystemExit], code: int, tmp_path: Path
) -> None:
    whole = module_of()
    fit(whole)
    before, engine = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)), TransformersEngine()
    with pytest.raises(ending) as ended:
        fit(module_of(engine=engine), callbacks=[Signals(number, 2)], default_root_dir=tmp_path)
    assert ended.value.code == code, "which a scheduler reads: 0 would be a run that has finished"
    assert engine.state is EngineState.ASLEEP
    signal.signal(signal.SIGINT, before[0])  # Lightning ignores SIGINT once it has begun to shut down
    saved = torch.load(tmp_path / INTERRUPTED, weights_only=True)
    assert saved["global_step"] == 5, "the signal came while the second rollout was drawn; its first step was made"
    resumed = module_of()
    fit(resumed, ckpt_path=tmp_path / INTERRUPTED)
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(resumed).items())


def test_handlers_are_as_before_once_a_fit_is_over(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(module_of(), default_root_dir=tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not (tmp_path / INTERRUPTED).exists()


def test_an_exception_closes_the_engine_and_saves_the_last_step(tmp_path: Path) -> None:
    engine = TransformersEngine()
    with pytest.raises(RuntimeError, match="something else"):
        fit(module_of(engine=engine), callbacks=[Fails()], default_root_dir=tmp_path)
    assert engine.state is EngineState.ASLEEP
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 3


class Lost(TransformersEngine):
    """Is lost at its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        self.left -= 1
        if not self.left:
            raise EngineError("expected a server, got none")
        return super().generate_batch(requests, logprobs=logprobs)


@pytest.mark.nightly
def test_an_engine_that_is_lost_saves_the_last_step_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    def run(engine: Engine | None = None, ckpt_path: Path | None = None) -> RLLightningModule:
        module, data = module_of(engine=engine), tiny_prompts(8, 4)
        fit(
            module, callbacks=[DynamicSampling()], data=data, default_root_dir=tmp_path, max_epochs=2,
            ckpt_path=ckpt_path,
        )  # fmt: skip
        return module

    whole = run()
    with pytest.raises(EngineError, match="expected a server, got none"):
        run(Lost(2))  # in the first rollout; test_exceptions.py has a later one
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 0
    resumed = run(ckpt_path=tmp_path / INTERRUPTED)
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(resumed).items())


@pytest.mark.nightly
def test_an_engine_that_is_lost_while_it_is_validated_saves_the_last_step(tmp_path: Path) -> None:
    def run(engine: Engine | None = None, ckpt_path: Path | None = None) -> RLLightningModule:
        module, data = module_of(engine=engine), tiny_prompts(8, 4, validation=[[2, 3]])
        fit(module, data=data, default_root_dir=tmp_path, num_sanity_val_steps=0, max_epochs=3, ckpt_path=ckpt_path)
        return module

    whole = run()
    with pytest.raises(EngineError, match="expected a server, got none"):
        run(Lost(3))
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 8
    resumed = run(ckpt_path=tmp_path / INTERRUPTED)
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(resumed).items())
