"""Disks: full disks, folders without write access, several runs in one folder, and the newest checkpoint."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_rl import RLLightningModule
from lightning_rl.checkpointing import AtomicCheckpointIO, CheckpointError, latest_checkpoint
from lightning_rl.checkpointing.checkpoint_folder import LOCK, clear_parts
from lightning_rl.checkpointing.checksum import check_whole
from lightning_rl.recording import RolloutRecorder

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty", "ignore:Using ModelCheckpoint with manual optimization"
)

STEPS = 4
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pathlib import Path
from lightning_rl.checkpointing import AtomicCheckpointIO
import torch
folder = Path(sys.argv[1])
AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(10)}, folder / "good.ckpt")
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(10**6)}, folder / "large.ckpt")
except (OSError, RuntimeError) as failure:
    print(type(failure).__name__)
"""


class FullDisk:
    """``torch.save`` on a disk that is full from the n-th checkpoint on."""

    def __init__(self, save: Callable[..., None], at: int) -> None:
        self.save, self.left = save, at

    def __call__(self, content: Any, file: Any, *arguments: Any, **keywords: Any) -> None:
        """Saves, or breaks off."""
        self.left -= 1
        if self.left <= 0:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        self.save(content, file, *arguments, **keywords)


def run(folder: Path, *, ckpt_path: Path | None = None, top: int = -1, steps: int = STEPS, **options: Any) -> Any:
    """A checkpoint after each step."""
    module = tiny_module(**options)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=top)
    fit(module, callbacks=[saving], data=tiny_prompts(16, 4), ckpt_path=ckpt_path, max_steps=steps,
        enable_checkpointing=True)  # fmt: skip
    return module


def test_a_full_disk_ends_the_run_and_the_message_names_the_last_checkpoint_which_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", FullDisk(torch.save, 3))
        with pytest.raises(
            CheckpointError, match=r"No space left on device.*the last complete checkpoint is .*step=2.ckpt"
        ):
            run(tmp_path / "full")
    assert [path.name for path in sorted((tmp_path / "full").iterdir())] == ["step=1.ckpt", "step=2.ckpt"], "no parts"
    resumed = run(tmp_path / "full", ckpt_path=latest_checkpoint(tmp_path / "full"))
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(resumed).items())


def test_a_full_disk_lets_the_run_go_on_if_that_is_wanted_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    monkeypatch.setattr(torch, "save", FullDisk(torch.save, 3))
    with pytest.warns(UserWarning, match="the run continues without"):
        module = run(tmp_path / "full", top=1, on_checkpoint_error="warn")
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(module).items())
    newest = latest_checkpoint(tmp_path / "full")
    assert newest is not None and newest.name == "step=2.ckpt", "though ModelCheckpoint wanted to replace it"
    check_whole(newest)


@pytest.mark.nightly
def test_a_limit_of_the_file_system_leaves_no_part(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() in ("OSError", "RuntimeError"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]
    check_whole(tmp_path / "good.ckpt")


def test_the_newest_checkpoint_goes_by_step_and_not_by_the_clock(tmp_path: Path) -> None:
    for step, age in ((2, 0), (10, 100), (9, 50)):
        path = tmp_path / f"{step}.ckpt"
        AtomicCheckpointIO().save_checkpoint({"global_step": step}, path)
        os.utime(path, (time.time() - age, time.time() - age))
    assert latest_checkpoint(tmp_path) == tmp_path / "10.ckpt"
    torch.save({"global_step": 11}, tmp_path / "unsealed.ckpt")
    (tmp_path / "99.ckpt").write_bytes(b"cut off")
    (tmp_path / "98.ckpt.part").write_bytes(b"being written")
    assert latest_checkpoint(tmp_path) == tmp_path / "unsealed.ckpt"


def test_two_runs_in_one_folder_are_told_at_the_start_of_the_second_and_of_a_third(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    with pytest.warns(
        UserWarning, match=r"holds checkpoints of another run \(step=\d.ckpt of run [0-9a-f]{8}; this is"
    ):
        run(tmp_path, steps=1)
    with pytest.raises(ValueError, match="expected the checkpoints of one run in"):
        latest_checkpoint(tmp_path)


def test_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    run(tmp_path, steps=2)
    run(tmp_path, steps=4, ckpt_path=tmp_path / "step=2.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "step=4.ckpt"


@pytest.mark.nightly
def test_a_folder_where_another_process_writes_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lightning_rl.checkpointing.checkpoint_folder import RunFolder;"
        "folder = RunFolder(Path(sys.argv[1])); folder.claim('0123abcd'); print('there', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "there\n"
            assert json.loads((tmp_path / LOCK).read_text())["run"] == "0123abcd"
            with pytest.raises(ValueError, match=r"where another run writes .*0123abcd"):
                run(tmp_path)
        finally:
            other.kill()
    run(tmp_path, steps=1)


def test_a_folder_that_cannot_be_written_to_is_told_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="expected a writable folder for checkpoints, got /proc/check"):
        run(Path("/proc/checkpoints"))


def test_what_a_dying_run_left_is_cleared_away_and_what_it_was_replacing_put_back(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    (tmp_path / "step=1.ckpt").rename(tmp_path / "step=1.ckpt.before.part")
    (tmp_path / "step=2.ckpt.part").write_bytes(b"half")
    (tmp_path / "sharded.ckpt.part").mkdir()
    (tmp_path / "sharded.ckpt.part" / "shard").write_bytes(b"half")
    clear_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]


KILLED = """
import ctypes, os, signal, sys
from pathlib import Path
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_rl.checkpointing import AtomicCheckpointIO, atomic, checksum, latest_checkpoint

class Folder(AtomicCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        path.mkdir()
        for name in ("meta.pt", "shard"):
            torch.save(checkpoint, path / name)

def save(step, name):
    state = {"global_step": step, "optimizer_states": [], "pytorch-lightning_version": "2"}
    strategy.save_checkpoint(state, folder / name)

def work():
    save(2, "last.ckpt")
    save(3, "last.ckpt")
    save(3, "step=3.ckpt")
    strategy.remove_checkpoint(folder / "step=3.ckpt")
    strategy.remove_checkpoint(folder / "step=1.ckpt")

def kill_at(moment):
    left = [moment]
    def count(event, arguments):
        if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

for number in range(4):
    folder = Path(sys.argv[1], str(number))
    strategy = SingleDeviceStrategy("cpu", checkpoint_io=Folder() if number % 2 else TorchCheckpointIO())
    atomic.protect_checkpoints(strategy, "raise")
    if number == 2:
        ctypes.CDLL = lambda _: object()  # of a system without renameat2
    save(1, "last.ckpt")
    save(1, "step=1.ckpt")
    for moment in range(1, 1000):
        if (child := os.fork()) == 0:
            kill_at(moment)
            work()
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        last = latest_checkpoint(folder)
        assert last is not None and (folder / "last.ckpt").exists(), (number, moment)
        checksum.check_whole(last)
    print(moment)
"""


def test_a_run_killed_at_any_rename_or_removal_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert all(int(moments) > 5 for moments in ran.stdout.split()) and len(ran.stdout.split()) == 4


def test_a_recorder_that_cannot_write_says_so_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "recorded").write_text("in the way")
    module = tiny_module()
    with pytest.warns(
        UserWarning, match=r"expected to write a recording of rollout \d to .*, got .*; the run continues"
    ):
        trainer = fit(module, callbacks=[RolloutRecorder(tmp_path / "recorded")], max_steps=3)
    assert trainer.global_step == 3 and isinstance(module, RLLightningModule)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (
            lambda path: path.write_text("mine"),
            "got a file instead of its folder: there is no earlier checkpoint; put",
        ),
        (
            lambda path: path.symlink_to(path / ".." / "gone"),
            "got a broken link instead of its folder: there is",
        ),
    ],
    ids=["file", "link"],
)
def test_a_folder_that_something_else_took_the_place_of_is_named(
    put: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    class Replaces(ModelCheckpoint):
        """Finds something else where its folder was."""

        @override
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            shutil.rmtree(str(self.dirpath))
            put(Path(str(self.dirpath)))

    with pytest.raises(CheckpointError, match=message):
        fit(
            tiny_module(), callbacks=[Replaces(tmp_path / "kept")], enable_checkpointing=True, default_root_dir=tmp_path
        )


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    saving = [
        ModelCheckpoint(tmp_path, "whole-{step}", every_n_train_steps=3, save_top_k=-1),
        ModelCheckpoint(tmp_path, "weights", save_weights_only=True),
    ]
    fit(tiny_module(minibatches_per_rollout=2), callbacks=saving, enable_checkpointing=True, default_root_dir=tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "whole-step=6.ckpt", "of step 6; the weights are of step 8"
    with pytest.raises(ValueError, match="expected a checkpoint to resume from, got weights alone"):
        fit(tiny_module(minibatches_per_rollout=2), ckpt_path=tmp_path / "weights.ckpt", default_root_dir=tmp_path)
    for path in tmp_path.glob("whole*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"to resume from in .*, got weights only \(weights\.ckpt\): save with"):
        latest_checkpoint(tmp_path)


def test_a_folder_whose_checkpoints_lie_below_is_told_which_one_to_pass(tmp_path: Path) -> None:
    below = tmp_path / "version_0" / "checkpoints"
    fit(tiny_module(), callbacks=[ModelCheckpoint(below)], enable_checkpointing=True, default_root_dir=tmp_path)
    assert latest_checkpoint(below) is not None and latest_checkpoint(tmp_path / "missing") is None
    for folder in (tmp_path, below.parent):
        with pytest.raises(ValueError, match=f"in {folder} itself, got some in {below}: pass that folder"):
            latest_checkpoint(folder)


def test_the_newest_checkpoint_of_a_folder_is_no_pipe_and_no_link_to_nowhere(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "gone")
    AtomicCheckpointIO().save_checkpoint({"global_step": 3}, tmp_path / "good.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "good.ckpt"
    with pytest.raises(
        ValueError, match=r"expected a folder of checkpoints, got the file .*good\.ckpt: pass its folder"
    ):
        latest_checkpoint(tmp_path / "good.ckpt")
