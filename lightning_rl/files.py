"""Files and folders that are there whole or not at all, whatever moment the machine dies at."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

PART = ".part"
PROBE = ".mode" + PART
BEFORE = ".before" + PART  # what is being replaced, for a moment


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Has ``write`` make a file or a folder beside the target, puts it on the disk, and renames it.

    Files have the mode that the umask gives, whatever ``write`` makes them with.

    Whatever is raised on the way leaves the target as it was, and no part of the new one.

    Args:
        path: the target; a file is replaced, a folder has to be new.
        write: makes what is written, at the path that it is given.
    """
    part = path.with_name(path.name + PART)
    try:
        write(part)
        apply_umask(part)
        flush(part)
        part.rename(path) if part.is_dir() else part.replace(path)
    except BaseException:
        remove(part)
        raise


def move_over(part: Path, path: Path) -> None:
    """Puts a file or a folder on the disk and in the place of another one, which goes away once the new one is there.

    Args:
        part: what was written, in the folder of the target.
        path: the target.
    """
    flush(part)
    if not part.is_dir() and not path.is_dir():
        part.replace(path)
        return
    before = path.with_name(path.name + BEFORE)
    remove(before)
    if path.exists():
        path.rename(before)
    try:
        part.rename(path)
    except BaseException:
        if before.exists():
            before.rename(path)
        raise
    remove(before)


def apply_umask(path: Path) -> None:
    """Gives a file, or every file of a folder, the mode of one that ``open`` makes beside it.

    Safetensors writes files that only their owner may read.
    """
    probe = path.with_name(path.name + PROBE)
    try:
        probe.touch()  # asking for the umask itself would change it for every thread
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for file in files_of(path):
        if not file.is_symlink():
            file.chmod(mode)


def flush(path: Path) -> None:
    """Puts a file, or every file of a folder, on the disk."""
    for file in files_of(path):
        with file.open("rb") as written:
            os.fsync(written.fileno())


def files_of(path: Path) -> list[Path]:
    """A file, or every file of a folder."""
    return [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
