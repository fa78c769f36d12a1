"""Signals of schedulers: SLURM's before a requeue, and SIGTERM to a step that would outlast the grace."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import differing, fit, tiny_module, tiny_prompts
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl import RLCallback, RLLightningModule, Rollout
from lightning_rl.checkpointing import INTERRUPTED, fault_tolerance

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "rl", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NODELIST": "127.0.0.1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


class Sends(RLCallback):
    """Sends a signal to this process in the second rollout, and hangs for a minute if that is wanted."""

    name = "sends"

    def __init__(self, number: int, *, hangs: bool = False) -> None:
        self.number, self.hangs, self.seen = number, hangs, 0

    @override
    def observe(self, rollout: Rollout) -> None:
        self.seen += 1
        if self.seen == 2:
            os.kill(os.getpid(), self.number)

    @override
    def on_after_backward(self, *arguments: Any, **keywords: Any) -> None:
        end = time.monotonic() + 60
        while self.hangs and self.seen == 2 and time.monotonic() < end:
            time.sleep(0.01)


def run(folder: Path, *callbacks: Callback, **options: Any) -> tuple[RLLightningModule, Trainer]:
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2)
    data = tiny_prompts(16, 4)
    return module, fit(module, callbacks=callbacks, data=data, default_root_dir=folder, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RLLightningModule]:
    """Modules of runs of one epoch and of two that no signal ended."""
    folder = tmp_path_factory.mktemp("whole")
    return {epochs: run(folder, max_epochs=epochs)[0] for epochs in (1, 2)}


@pytest.mark.nightly
def test_the_signal_of_slurm_saves_at_the_end_of_the_step_queues_the_job_and_its_next_start_resumes(
    whole: dict[int, RLLightningModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, said = tmp_path / "bin" / "scontrol", tmp_path / "said"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SIGTERMException) as ended:
        run(tmp_path / "job", Sends(signal.SIGUSR1), plugins=[SLURMEnvironment()])
    assert ended.value.code == 128 + signal.SIGUSR1 and said.read_text() == "requeue 4711\n"
    assert signal.getsignal(signal.SIGUSR1) == before
    saved = torch.load(tmp_path / "job" / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 5, "the signal came while the second rollout was made; its first step was made"
    resumed, trainer = run(tmp_path / "job", plugins=[SLURMEnvironment()])
    assert trainer.global_step == 16
    assert not differing(resumed, whole[1])


def test_a_step_that_outlasts_the_grace_is_left_and_the_run_goes_on_before_it(
    whole: dict[int, RLLightningModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_tolerance, "GRACE", 0.3)
    begin = time.monotonic()
    with pytest.raises(SIGTERMException) as ended:
        run(tmp_path, Sends(signal.SIGTERM, hangs=True))
    assert time.monotonic() - begin < 30 and ended.value.code == 143
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 4
    resumed, _ = run(tmp_path, ckpt_path=tmp_path / INTERRUPTED)
    assert not differing(resumed, whole[1])


class SendsIn(Callback):
    """Sends SIGTERM to this process in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))


class LastSendsIn(SendsIn, Checkpoint):
    """The same, behind every other callback, where Lightning puts those that save."""


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_sanity_check_start", "on_train_start"])
def test_sigterm_before_the_first_step_ends_the_run_at_once_and_says_that_nothing_is_lost(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(number) for number in fault_tolerance.SIGNALS]
    with pytest.raises(SIGTERMException) as ended:
        fit(tiny_module(), callbacks=[SendsIn(hook)], data=tiny_prompts(validation=[[2, 3]]), default_root_dir=tmp_path)
    assert ended.value.code == 143 and not (tmp_path / INTERRUPTED).exists()
    assert "SIGTERM ended this fit before its first optimizer step: earlier checkpoints are kept" in caplog.messages
    assert [signal.getsignal(number) for number in fault_tolerance.SIGNALS] == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("on_train_epoch_end", SendsIn),
        ("on_train_end", SendsIn),
        ("on_train_end", LastSendsIn),
        ("on_fit_end", LastSendsIn),
        ("teardown", SendsIn),
    ],
)
def test_sigterm_after_the_last_step_ends_the_run_with_its_status_and_a_checkpoint(
    hook: str,
    kind: type[SendsIn],
    whole: dict[int, RLLightningModule],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = [signal.getsignal(number) for number in fault_tolerance.SIGNALS]
    with pytest.raises(SIGTERMException) as ended:
        run(tmp_path, kind(hook), enable_checkpointing=kind is LastSendsIn)
    path = tmp_path / INTERRUPTED
    assert ended.value.code == 143 and torch.load(path, weights_only=True)["global_step"] == 16
    assert f"after optimizer step 16: resume with ckpt_path={str(path)!r}" in caplog.text
    assert [signal.getsignal(number) for number in fault_tolerance.SIGNALS] == before
    resumed, _ = run(tmp_path, max_epochs=2, ckpt_path=path)
    assert not differing(resumed, whole[2])


def test_the_grace_ends_before_that_of_schedulers() -> None:
    assert fault_tolerance.GRACE + fault_tolerance.MEETING < 30
