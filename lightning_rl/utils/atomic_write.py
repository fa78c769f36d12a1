"""Atomic writes of files and folders."""

import ctypes
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

PART = ".part"
PROBE = ".mode" + PART
BEFORE = ".before" + PART  # the old version, until the new one is in place


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or folder beside the target, flush it to disk, and rename it.

    Files get the mode of the umask. An error leaves the target unchanged and no partial file.

    Args:
        path: Target; an existing file is replaced, a folder must not exist.
        write: Function that writes to the path that it is passed.
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
    """Flush a file or folder to disk, and replace the target with it.

    A folder and its target are exchanged in one step. On file systems without this operation, such as NFS, the target
    is absent between two renames; if the process is killed there, its old version is at the path with :data:`BEFORE`.

    Args:
        part: New file or folder, in the folder of the target.
        path: Target.
    """
    flush(part)
    if not part.is_dir() and not path.is_dir():
        part.replace(path)
        return
    if exchange(part, path):
        remove(part)
        return
    before = path.with_name(path.name + BEFORE)
    if path.exists():
        remove(before)
        path.rename(before)
    try:
        part.rename(path)
    except BaseException:
        if before.exists():
            before.rename(path)
        raise
    remove(before)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step; return False if one is missing or the file system cannot do that."""
    try:
        rename = ctypes.CDLL(None).renameat2  # Linux
    except AttributeError:
        return False
    here, exchanging = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(first), here, os.fsencode(second), exchanging) == 0


def apply_umask(path: Path) -> None:
    """Apply the umask to a file, or every file of a folder; safetensors makes files readable by the owner only."""
    probe = path.with_name(path.name + PROBE)
    try:
        probe.touch()  # os.umask would change it for every thread
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for file in files_of(path):
        if not file.is_symlink():
            file.chmod(mode)


def flush(path: Path) -> None:
    """Flush a file, or every file of a folder, to disk."""
    for file in files_of(path):
        with file.open("rb") as written:
            os.fsync(written.fileno())


def files_of(path: Path) -> list[Path]:
    """Return a file, or every file of a folder."""
    return [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists; a folder is renamed first, so that no half of it has its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    part = path
    if not path.name.endswith(PART):
        part = path.with_name(path.name + PART)
        remove(part)
        path.rename(part)
    shutil.rmtree(part)
