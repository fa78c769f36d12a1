"""Processes of this machine by a mark in their command line or environment."""

import time
from collections.abc import Callable, Collection
from pathlib import Path


def pids_with(mark: str) -> list[int]:
    """Return the ids of the processes that have a mark."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            try:
                found = mark.encode() in (folder / file).read_bytes()
            except OSError:
                continue
            if found:
                pids.append(int(folder.name))
                break
    return pids


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    """Return True once a condition holds, False if it does not in time."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return held


def gone(mark: str, but: Collection[int] = ()) -> bool:
    """Return True once no process has a mark, apart from some."""
    return wait_for(lambda: not set(pids_with(mark)) - set(but), 20.0)
