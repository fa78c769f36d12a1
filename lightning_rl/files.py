"""Files and folders that are there whole or not at all, whatever moment the machine dies at."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

PART = ".part"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Has ``write`` make a file or a folder beside the target, puts it on the disk, and renames it.

    Whatever is raised on the way leaves the target as it was, and no part of the new one.

    Args:
        path: the target; a file is replaced, a folder has to be new.
        write: makes what is written, at the path that it is given.
    """
    part = path.with_name(path.name + PART)
    try:
        write(part)
        for file in sorted(part.rglob("*")) if part.is_dir() else [part]:
            if file.is_file():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
        part.rename(path) if part.is_dir() else part.replace(path)
    except BaseException:
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        raise
