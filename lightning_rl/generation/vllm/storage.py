"""Folder of one trainer's weights on storage shared with servers, deleted after the trainer has ended."""

import fcntl
import os
import shutil
import socket
import threading
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from lightning_rl.generation.weights.weight_folder import write_weights
from lightning_rl.generation.weights.weight_stream import Weights

PREFIX, LOCK = "lightning-rl-", ".lock"


class WeightFolder:
    """Folder beside a file that this process keeps locked while it lives.

    Args:
        storage: Folder shared by trainer and servers.
        run: Random name of the run.
        private: True to let only this user read the folder.
    """

    def __init__(self, storage: Path, run: str, *, private: bool = False) -> None:
        self.run, self.path = run, storage / f"{PREFIX}{run}"
        self._mode = 0o700 if private else 0o777
        self._lock: TextIOWrapper | None = None
        self._kept: tuple[int, Weights] = -1, ()
        self._writing = threading.Lock()

    def open(self) -> None:
        """Create the folder, after deleting those that dead trainers of this machine left on the storage.

        A locked file belongs to a live trainer. Locks of other machines are not visible here, so their folders are
        kept.

        Raises:
            ValueError: If the storage cannot be written to.
        """
        storage = self.path.parent
        try:
            storage.mkdir(parents=True, exist_ok=True)
            delete_leftovers(storage)
            self._create()
        except OSError as error:
            where = f"expected storage= to be a folder that can be written to, got {storage}"
            raise ValueError(f"{where}: {error}") from error

    def _create(self) -> None:
        self._lock = self.path.with_name(self.path.name + LOCK).open("x")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(socket.gethostname())  # only from now on can it count as abandoned
        self._lock.flush()
        self.path.mkdir(mode=self._mode)

    def of(self, number: int) -> Path:
        """Return the folder of the weights of one push."""
        return self.path / str(number)

    def keep(self, weights: Weights, number: int = -1) -> None:
        """Store the weights of a push in memory, instead of those of another one, for :meth:`find`."""
        with self._writing:
            self._kept = number, weights

    def find(self, number: int) -> Path | None:
        """Return the folder of the weights of a push, written now if they were only kept; None without either."""
        folder = self.of(number)
        with self._writing:
            if not folder.exists():
                kept, weights = self._kept
                if kept != number:
                    return None
                write_weights(weights, folder)
        return folder

    def close(self) -> None:
        """Delete the folder, if this process created it."""
        lock, self._lock = self._lock, None
        self.keep(())  # after the end of a write
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            Path(lock.name).unlink(missing_ok=True)
            lock.close()


def delete_leftovers(storage: Path) -> None:
    """Delete the folders that dead trainers of this user left on this machine."""
    for lock in sorted(storage.glob(f"{PREFIX}*{LOCK}")):
        folder = lock.with_name(lock.name.removesuffix(LOCK))
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_uid == os.getuid() and file.read() == socket.gethostname():
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)


def check_inside(path: Path, storage: Path) -> None:
    """Check that a folder of weights is on the storage.

    Raises:
        ValueError: If it is not; names the path.
    """
    if not path.resolve().is_relative_to(storage.resolve()):
        raise ValueError(
            f"expected a folder of weights on {storage}, got {path}: start the server with lightning-rl serve "
            "--storage, and the storage= of the trainer"
        )
