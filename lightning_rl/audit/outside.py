"""Guard that keeps user code within the process while the audit calls it again."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REACHING = (
    *("socket.", "subprocess.", "shutil.", "sqlite3.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime", "os.kill"),
    *("os.chmod", "os.chown", "os.setxattr"),
)
"""Prefixes of the events of ``sys.addaudithook`` that leave the process."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_thread = threading.local()
_installed = list[bool]()


class OutsideError(Exception):
    """User code accessed something outside of the process, so it is not called again."""


@contextmanager
def refuse_outside() -> Iterator[None]:
    """Block writes of files, connections and programs in this thread.

    Raises:
        OutsideError: At the end, if one was blocked, even if the code caught the first error.
    """
    if not _installed:
        sys.addaudithook(_refuse)  # cannot be removed
        _installed.append(True)
    _thread.reached = reached = list[str]()
    try:
        yield
    finally:
        _thread.reached = None
        if reached:
            raise OutsideError(f"it accesses something outside of its process ({reached[0]})")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    reached = getattr(_thread, "reached", None)
    if reached is None:
        return
    writes = event == "open" and bool((arguments[2] or 0) & WRITING) and arguments[0] != os.devnull
    if writes or event.startswith(REACHING):
        reached.append(event)
        raise PermissionError(f"{event} in a repeated call of the audit")
