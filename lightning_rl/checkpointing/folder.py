"""Folder: the newest checkpoint of one, and what is wrong with it at the start of a run."""

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

from lightning_rl.archive import load_archive
from lightning_rl.checkpointing.seal import Seal, check_seal, holds_weights_alone, read_seal
from lightning_rl.files import BEFORE, PART, remove

BELOW = ("*/", "*/*/", "*/*/*/")
LOCK = ".lightning-rl-run"


def new_run() -> str:
    """The name of a new run; it takes nothing from the generators that a run is seeded by."""
    return uuid.uuid4().hex[:8]


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of a folder with the most optimizer steps, or None if there is none.

    What a dying run was writing is left out, and so is what cannot be read. Of two with equal steps it is the one that
    was written last.

    Raises:
        ValueError: if the checkpoints belong to several runs, of which nobody can say which one should go on, if they
            hold weights alone, if they lie in a folder below, or if it is no folder.
    """
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"expected a folder of checkpoints, got the file {folder}: pass the folder that it lies in")
    seals = seals_of(Path(folder))
    below = (path for depth in BELOW for path in sorted(Path(folder).glob(f"{depth}*.ckpt")))
    if not seals and (other := next(below, None)) is not None:
        raise ValueError(f"expected checkpoints in {folder} itself, got some in {other.parent}: pass that folder")
    runs = {seal.run: path for path, seal in seals.items() if seal.run}
    if len(runs) > 1:
        several = " and ".join(f"{path.name} of run {run}" for run, path in sorted(runs.items())[:2])
        raise ValueError(
            f"expected the checkpoints of one run in {folder}, got {several}: pass one of them by name, and give each "
            "run a folder of its own"
        )
    newest = sorted(seals, key=lambda path: (seals[path].step, path.stat().st_mtime_ns), reverse=True)
    last = next((path for path in newest if not holds_weights_alone(path)), None)
    if last is None and newest:
        raise ValueError(
            f"expected a checkpoint that a run can go on from in {folder}, got weights alone ({newest[0].name}): save "
            "with ModelCheckpoint(save_weights_only=False), or look for them by name"
        )
    return last


def seals_of(folder: Path) -> dict[Path, Seal]:
    """The checkpoints of a folder that can be read, with run and step."""
    whole = (path for path in sorted(folder.glob("*.ckpt")) if not path.name.endswith(PART))
    paths = (path for path in whole if path.is_file() or path.is_dir())  # to open a pipe is to wait for its writer
    return {path: seal for path in paths if (seal := _seal(path)) is not None}


def _seal(path: Path) -> Seal | None:
    try:
        seal = read_seal(path)
        if seal is not None:
            return seal
        if path.is_dir():
            return Seal("", -1) if any(path.iterdir()) else None
        check_seal(path)
        checkpoint = load_archive(path, mmap=True)
        return Seal("", int(checkpoint.get("global_step", -1)) if isinstance(checkpoint, dict) else -1)
    except (OSError, ValueError, TypeError):  # TypeError: a step that is no number
        return None


class RunFolder:
    """A folder while a run writes its checkpoints there. The kernel ends the claim when the process dies.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def claim(self, run: str) -> None:
        """Makes the folder, keeps other runs out, and clears away what a run that died was writing.

        Raises:
            ValueError: if it cannot be written to, or another process writes there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            lock = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as failure:
            raise ValueError(
                f"expected a folder for checkpoints that can be written to, got {self.path} ({failure.strerror}): pass "
                "another dirpath= to ModelCheckpoint, or another default_root_dir= to the Trainer"
            ) from failure
        self._take(lock)
        lock.truncate(0)
        lock.write(json.dumps({"run": run, "host": socket.gethostname(), "pid": os.getpid()}))
        lock.flush()
        self._lock = lock
        clear_parts(self.path)
        others = {seal.run: path.name for path, seal in seals_of(self.path).items() if seal.run not in ("", run)}
        if others:
            name, file = sorted(others.items())[0]
            rank_zero_warn(
                f"{self.path} holds checkpoints of another run ({file} of run {name}; this is run {run}): resume from "
                "one of them, or give each run a folder of its own, since latest_checkpoint refuses a mixed one"
            )

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise ValueError(
                f"expected a folder for checkpoints of this run alone, got {self.path}, where another run is writing "
                f"({holder}): give each run a folder of its own, or end the other one"
            ) from None
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        """Ends the claim."""
        if self._lock is not None:
            with suppress(OSError):  # whoever put something else in the place of the folder has taken the lock away
                (self.path / LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


def clear_parts(folder: Path) -> None:
    """Removes what a run that died left half written, and puts back what it was about to replace."""
    for part in sorted(folder.glob(f"*.ckpt*{PART}")):
        if part.name.endswith(BEFORE):
            target = part.with_name(part.name.removesuffix(BEFORE))
            if not target.exists():
                part.rename(target)
                continue
        remove(part)


def release(folders: Iterable[RunFolder]) -> None:
    """Ends every claim."""
    for folder in folders:
        folder.release()
