"""URLs of a run's servers, which a file or a function may change during the run."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.http import quote, read_url

LOG = logging.getLogger(__name__)
READ = 1.0  # seconds between two reads
LEAVING = 5.0  # seconds that the end of a run waits for the function that lists servers

Listing = str | Sequence[str] | Path | Callable[[], Iterable[str]]


class Members:
    """List of server URLs.

    Args:
        servers: Fixed URLs; or a file with one URL per line, in which empty lines and comments (``#``) are ignored; or
            a function that returns URLs.
        check: Function that raises a ValueError for a URL that the run cannot use.

    Raises:
        ValueError: If fixed URLs are empty, repeated, or unusable.
    """

    def __init__(self, servers: Listing, check: Callable[[str], object]) -> None:
        self._servers, self._check = servers, check
        self.fixed = not (callable(servers) or isinstance(servers, Path))
        urls = list(self._lines()) if self.fixed else []
        if self.fixed and (not urls or len(urls) != len(self.read())):
            raise ValueError(f"expected URLs of one or more servers, each of them once, got {urls}")

    @property
    def source(self) -> str:
        """Name of the file or the function; empty for fixed URLs."""
        return "" if self.fixed else str(getattr(self._servers, "__qualname__", self._servers))

    def read(self) -> tuple[str, ...]:
        """Return the URLs, normalized and without repetitions.

        Raises:
            ValueError: If there are none, or one is unusable, as in a list that is being written.
        """
        try:
            lines = list(self._lines())
        except Exception as error:  # of function or disk; the run keeps its servers
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not lines:
            raise ValueError("expected URLs of one or more servers, got none")
        urls = [read_url(str(line)).geturl() for line in lines]
        for url in urls:
            self._check(url)
        return tuple(dict.fromkeys(urls))

    def _lines(self) -> Iterable[str]:
        servers: Any = self._servers
        if isinstance(servers, Path):
            lines = (line.partition("#")[0].strip() for line in servers.read_text().splitlines())
            return [line for line in lines if line]
        if callable(servers):
            servers = servers()
        return [servers] if isinstance(servers, str) else servers

    def wait(self, patience: float) -> tuple[str, ...]:
        """Return the first usable list.

        Raises:
            EngineError: If there is none within ``patience`` seconds.
        """
        end, said = time.monotonic() + patience, ""
        while True:
            try:
                return self.read()
            except ValueError as error:
                why = quote(str(error))
            if time.monotonic() >= end:
                raise EngineError(f"expected servers to be listed by {self.source} within {patience:g} s: {why}")
            if why != said:
                LOG.warning("waiting up to %g s for servers to be listed by %s: %s", patience, self.source, why)
                said = why
            time.sleep(min(READ, patience))


class Membership:
    """Updates a run's servers from their list: rank 0 reads it and passes it to the other ranks through the store.

    A list is used once two reads agree, which excludes a list that is being written. An unusable list changes nothing
    and is logged.

    Args:
        members: List of servers.
        urls: URLs at the start of the run.
        follow: Function called in a thread with each new list.
        store: Store of the process group; None for a single process.
        name: Key in the store.
        reads: True on rank 0.
    """

    def __init__(
        self,
        members: Members,
        urls: Sequence[str],
        follow: Callable[[Sequence[str]], object],
        *,
        store: Store | None,
        name: str,
        reads: bool,
    ) -> None:
        self._members, self._urls, self._follow = members, tuple(urls), follow
        self._store, self._name, self._reads = store, name, reads
        self._before, self._said = self._urls, ""  # URLs and error of the previous read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="servers-listed", daemon=True)
        if not members.fixed:
            self._thread.start()

    def close(self) -> None:
        """Stop reading; a function that does not return is abandoned."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LEAVING)

    def _watch(self) -> None:
        while not self._ended.wait(READ):
            urls = self._read() if self._reads else self._receive()
            if set(urls) != set(self._urls) and not self._ended.is_set():
                self._urls = urls
                self._follow(urls)
                if self._reads and self._store is not None:
                    self._store.set(self._name, "\n".join(urls))

    def _read(self) -> tuple[str, ...]:
        """Return the list if it equals the previous read, otherwise the URLs in use."""
        try:
            urls, why = self._members.read(), ""
        except ValueError as error:
            urls, why = self._urls, quote(str(error))
        if why and why != self._said:
            LOG.warning("servers stay as they are, because the list of %s is unusable: %s", self._members.source, why)
        before, self._before, self._said = self._before, urls, why
        return urls if set(urls) == set(before) else self._urls

    def _receive(self) -> tuple[str, ...]:
        """Return the URLs that rank 0 uses; stop if its store is gone."""
        try:
            if self._store is not None and self._store.check([self._name]):
                return tuple(self._store.get(self._name).decode().split("\n"))
        except RuntimeError:
            self._ended.set()
        return self._urls
