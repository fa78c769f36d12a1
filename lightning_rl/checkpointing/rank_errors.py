"""Files with the error of each failing rank, beside the checkpoints.

The other ranks notice a failure when its process, which may hold the store, is gone: only a file can hold its cause.
Under torchrun the error is in its error file as well, as with ``torch.distributed.elastic``'s ``record``.
"""

import json
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_rl.checkpointing.atomic import is_local
from lightning_rl.checkpointing.checkpoint_folder import latest_checkpoint
from lightning_rl.utils.keys import hide_secrets

LENGTH = 500  # maximum number of characters of an error
FILE = "failed-rank-{}.json"


def write_rank_error(folder: str | Path, rank: int, error: BaseException) -> None:
    """Write the error of a rank into a folder, where it stays until the next run starts there."""
    with suppress(OSError):  # do not hide the error that ended the run
        get_error_handler().record_exception(error)
        if is_local(folder):
            text = json.dumps([rank, hide_secrets(f"{type(error).__name__}: {error}")[:LENGTH]])
            (Path(folder) / FILE.format(rank)).write_text(text, encoding="utf-8")


def first_rank_error(folder: str | Path) -> tuple[int, str] | None:
    """Return rank and text of the first error in a folder, or None."""
    files = sorted(_files(folder), key=lambda path: path.stat().st_mtime_ns)
    return tuple(json.loads(files[0].read_text(encoding="utf-8"))) if files else None


def clear_rank_errors(folder: str | Path) -> None:
    """Remove the files of an earlier run, or after a checkpoint of all ranks."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def resume_hint(folder: str | Path) -> str:
    """Return the advice on how to resume a run that could not be saved."""
    try:
        last = latest_checkpoint(folder) if is_local(folder) else None
    except (OSError, ValueError):  # such as checkpoints of several runs
        last = None
    return "resume from the last checkpoint" if last is None else f"resume with ckpt_path={str(last)!r}"


def _files(folder: str | Path) -> list[Path]:
    return list(Path(folder).glob(FILE.format("*"))) if is_local(folder) else []
