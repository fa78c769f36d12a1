"""Checkpoint folder: its newest checkpoint, and checks at the start of a run."""

import fcntl
import json
import os
import socket
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.checkpointing.checksum import Origin, read_origin
from lightning_rl.utils.atomic_write import BEFORE, PART, remove

BELOW = ("*/", "*/*/", "*/*/*/")
LOCK = ".lightning-rl-run"


def new_run() -> str:
    """Return a random name for a run, without using the seeded generators."""
    return uuid.uuid4().hex[:8]


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of a folder with the most optimizer steps, or None if there is none.

    Unfinished and unreadable files are skipped. Of two checkpoints with equal steps, the newer one is returned. A
    checkpoint that a killed run was replacing is restored first.

    Raises:
        ValueError: If the checkpoints belong to several runs, hold weights only or are in a subfolder, or if the path
            is not a folder.
    """
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"expected a folder of checkpoints, got the file {folder}: pass its folder")
    restore_old(Path(folder))
    origins = origins_of(Path(folder))
    below = (path for depth in BELOW for path in sorted(Path(folder).glob(f"{depth}*.ckpt")))
    if not origins and (other := next(below, None)) is not None:
        raise ValueError(f"expected checkpoints in {folder} itself, got some in {other.parent}: pass that folder")
    runs = {origin.run: path for path, origin in origins.items() if origin.run}
    if len(runs) > 1:
        several = " and ".join(f"{path.name} of run {run}" for run, path in sorted(runs.items())[:2])
        raise ValueError(
            f"expected the checkpoints of one run in {folder}, got {several}: pass one of them by path, and give each "
            "run a separate folder"
        )
    newest = sorted(origins, key=lambda path: (origins[path].step, path.stat().st_mtime_ns), reverse=True)
    last = next((path for path in newest if origins[path].resumable), None)
    if last is None and newest:
        raise ValueError(
            f"expected a checkpoint to resume from in {folder}, got weights only ({newest[0].name}): save "
            "with ModelCheckpoint(save_weights_only=False), or pass the path of the weights"
        )
    return last


def origins_of(folder: Path) -> dict[Path, Origin]:
    """Return the readable checkpoints of a folder, with run and step."""
    whole = (path for path in sorted(folder.glob("*.ckpt")) if not path.name.endswith(PART))
    return {path: origin for path in whole if (origin := read_origin(path)) is not None}


class RunFolder:
    """Claim of a run on its checkpoint folder; the kernel releases it when the process dies.

    Args:
        path: Path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def claim(self, run: str) -> None:
        """Create the folder, lock out other runs and remove unfinished files of a dead run.

        Raises:
            ValueError: If the folder is not writable, or another process writes there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            lock = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as failure:
            raise ValueError(
                f"expected a writable folder for checkpoints, got {self.path} ({failure.strerror}): pass "
                "another dirpath= to ModelCheckpoint, or another default_root_dir= to the Trainer"
            ) from failure
        self._take(lock)
        lock.truncate(0)
        lock.write(json.dumps({"run": run, "host": socket.gethostname(), "pid": os.getpid()}))
        lock.flush()
        self._lock = lock
        clear_parts(self.path)
        others = {
            origin.run: path.name for path, origin in origins_of(self.path).items() if origin.run not in ("", run)
        }
        if others:
            name, file = sorted(others.items())[0]
            rank_zero_warn(
                f"{self.path} holds checkpoints of another run ({file} of run {name}; this is run {run}): resume from "
                "one of them, or give each run a separate folder, since latest_checkpoint refuses a mixed one"
            )

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise ValueError(
                f"expected a checkpoint folder that only this run uses, got {self.path}, where another run writes "
                f"({holder}): give each run a separate folder, or end the other run"
            ) from None
        except OSError:
            pass  # the file system has no locks

    def release(self) -> None:
        """Release the claim."""
        if self._lock is not None:
            with suppress(OSError):  # a replaced folder has lost the lock file
                (self.path / LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


def clear_parts(folder: Path) -> None:
    """Remove files that a dead run left unfinished, and restore the files that it was about to replace."""
    _restore(folder)
    for part in sorted(folder.glob(f"*.ckpt*{PART}")):
        remove(part)


def restore_old(folder: Path) -> None:
    """Restore the checkpoints of a folder that a dead run was about to replace, unless a run writes there now."""
    if not any(folder.glob(f"*.ckpt{BEFORE}")):
        return
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        pass  # no run has claimed the folder, or the file system has no locks
    _restore(folder)


def _restore(folder: Path) -> None:
    for before in folder.glob(f"*.ckpt{BEFORE}"):
        if not (target := before.with_name(before.name.removesuffix(BEFORE))).exists():
            before.rename(target)


def release(folders: Iterable[RunFolder]) -> None:
    """Release every claim."""
    for folder in folders:
        folder.release()
