"""RunFolder: where one trainer keeps its weights on storage that it shares with servers, gone once the trainer is."""

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

PREFIX, LOCK = "lightning-rl-", ".lock"


class RunFolder:
    """A folder beside a file that this process keeps locked as long as it lives, whatever it dies of.

    Args:
        storage: the folder that trainer and servers share.
        run: a random name.
        private: whether nobody but this user may look into the folder.
    """

    def __init__(self, storage: Path, run: str, *, private: bool = False) -> None:
        self.path = storage / f"{PREFIX}{run}"
        self._mode = 0o700 if private else 0o777
        self._lock: TextIOWrapper | None = None

    def open(self) -> None:
        """Makes the folder, after those that dead trainers of this machine have left on the same storage are removed.

        A file that is locked belongs to a trainer that lives. Whether one of another machine does cannot be seen from
        here, so nothing of theirs is touched.

        Raises:
            ValueError: if the storage cannot be written to.
        """
        try:
            self._open(self.path.parent)
        except OSError as error:
            where = f"expected storage= to be a folder that can be written to, got {self.path.parent}"
            raise ValueError(f"{where}: {error}") from error

    def _open(self, storage: Path) -> None:
        storage.mkdir(parents=True, exist_ok=True)
        for folder in leftovers(storage):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.with_name(folder.name + LOCK).unlink()
        self._lock = self.path.with_name(self.path.name + LOCK).open("x")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(socket.gethostname())  # only from now on can it count as abandoned
        self._lock.flush()
        self.path.mkdir(mode=self._mode)

    def close(self) -> None:
        """Removes the folder, if this process made it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            Path(lock.name).unlink(missing_ok=True)
            lock.close()


def leftovers(storage: Path) -> Iterator[Path]:
    """Folders of this user's trainers that died on this machine and could not remove them."""
    for lock in sorted(storage.glob(f"{PREFIX}*{LOCK}")):
        folder = lock.with_name(lock.name.removesuffix(LOCK))
        with suppress(OSError), _open_itself(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(file.fileno()).st_uid == os.getuid() and file.read() == socket.gethostname()
            if ours and not folder.is_symlink():
                yield folder


def _open_itself(path: Path) -> TextIOWrapper:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))


def check_inside(path: Path, storage: Path) -> None:
    """Refuses a folder of weights that is not one of a run on the storage, under its own name.

    Raises:
        ValueError: naming the path and what it is.
    """
    where = f"expected a folder of weights on {storage}, got {path}"
    root = next((root for root in (storage.absolute(), storage.resolve()) if path.is_relative_to(root)), None)
    if root is None:
        raise ValueError(
            f"{where}: start the server with lightning-rl serve --storage, and the storage= of the trainer"
        )
    parts = path.relative_to(root).parts
    if len(parts) != 2 or not re.fullmatch(rf"{PREFIX}\w+", parts[0]) or not re.fullmatch("[0-9]+", parts[1]):
        raise ValueError(f"{where}, which no trainer has named")
    if path.parent.is_symlink() or path.is_symlink():
        raise ValueError(f"{where}, which leads through a symbolic link")
