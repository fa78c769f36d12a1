"""Farewells: what each rank of a run leaves beside the checkpoints when it fails, for ranks that outlive it.

A rank that fails alone cannot fetch the others out of the collective in which they wait for it, so they hear of its end
once its process is gone, and by then nothing but a file is left to say why.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_rl.checkpointing.atomic import is_local
from lightning_rl.checkpointing.folder import latest_checkpoint

LENGTH = 500  # characters of an error


class Farewell(NamedTuple):
    """The end of one rank.

    Attributes:
        at: seconds since 1970.
        rank: whose.
        error: class and text of what ended it.
    """

    at: float
    rank: int
    error: str


def leave_farewell(folder: str | Path, rank: int, error: BaseException) -> None:
    """Writes the end of a rank into a folder, where it stays until the next run begins there."""
    farewell = Farewell(time.time(), rank, f"{type(error).__name__}: {error}"[:LENGTH])
    if is_local(folder):
        with suppress(OSError):  # what ended the run is the news
            _path(Path(folder), rank).write_text(json.dumps(farewell), encoding="utf-8")


def first_farewell(folder: str | Path) -> Farewell | None:
    """That of the rank which failed before all others, as far as they share a folder; None if none of them does."""
    farewells = list[Farewell]()
    for path in Path(folder).glob(_path(Path(), "*").name) if is_local(folder) else ():
        with suppress(OSError, ValueError, TypeError):
            at, rank, error = json.loads(path.read_text(encoding="utf-8"))
            farewells.append(Farewell(float(at), int(rank), str(error)))
    return min(farewells, default=None)


def clear_farewells(folder: str | Path) -> None:
    """Removes those of an earlier run, or of ranks that met after all."""
    for path in Path(folder).glob(_path(Path(), "*").name) if is_local(folder) else ():
        path.unlink(missing_ok=True)


def way_on(folder: str | Path) -> str:
    """Where a run that could not be saved goes on."""
    try:
        last = latest_checkpoint(folder) if is_local(folder) else None
    except (OSError, ValueError):  # checkpoints of several runs, of which nobody can choose
        last = None
    return "go on from the last checkpoint" if last is None else f"go on with ckpt_path={str(last)!r}"


def _path(folder: Path, rank: int | str) -> Path:
    return folder / f"failed-rank-{rank}.json"
