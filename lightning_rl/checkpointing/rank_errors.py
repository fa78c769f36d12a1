"""Failure files: each failing rank writes its error beside the checkpoints.

A rank that fails alone cannot end the collective in which the others wait. They notice when its process is gone, and
then only a file can hold the cause.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_rl.checkpointing.atomic import is_local
from lightning_rl.checkpointing.checkpoint_folder import latest_checkpoint

LENGTH = 500  # maximum number of characters of an error


class Farewell(NamedTuple):
    """Failure of one rank.

    Attributes:
        at: Unix time in seconds.
        rank: Rank that failed.
        error: Class and text of the exception.
    """

    at: float
    rank: int
    error: str


def write_rank_error(folder: str | Path, rank: int, error: BaseException) -> None:
    """Write the failure of a rank into a folder, where it stays until the next run starts there."""
    farewell = Farewell(time.time(), rank, f"{type(error).__name__}: {error}"[:LENGTH])
    if is_local(folder):
        with suppress(OSError):  # do not hide the error that ended the run
            _path(Path(folder), rank).write_text(json.dumps(farewell), encoding="utf-8")


def first_farewell(folder: str | Path) -> Farewell | None:
    """Return the first failure of all ranks that share the folder, or None."""
    farewells = list[Farewell]()
    for path in Path(folder).glob(_path(Path(), "*").name) if is_local(folder) else ():
        with suppress(OSError, ValueError, TypeError):
            at, rank, error = json.loads(path.read_text(encoding="utf-8"))
            farewells.append(Farewell(float(at), int(rank), str(error)))
    return min(farewells, default=None)


def clear_farewells(folder: str | Path) -> None:
    """Remove the failure files of an earlier run, or after a checkpoint of all ranks."""
    for path in Path(folder).glob(_path(Path(), "*").name) if is_local(folder) else ():
        path.unlink(missing_ok=True)


def resume_hint(folder: str | Path) -> str:
    """Return the advice on how to resume a run that could not be saved."""
    try:
        last = latest_checkpoint(folder) if is_local(folder) else None
    except (OSError, ValueError):  # such as checkpoints of several runs
        last = None
    return "resume from the last checkpoint" if last is None else f"resume with ckpt_path={str(last)!r}"


def _path(folder: Path, rank: int | str) -> Path:
    return folder / f"failed-rank-{rank}.json"
