"""Members: the URLs of a run's servers, which somebody may keep in a file or a function while the run goes on."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.http import quote

LOG = logging.getLogger(__name__)
READ = 1.0  # seconds between two readings
LEAVING = 5.0  # seconds that the end of a run waits for a function that lists servers

Listing = str | Sequence[str] | Path | Callable[[], Iterable[str]]


class Members:
    """Servers by their URLs, as they are listed now.

    Args:
        servers: URLs, which stay; or a file with one of them on each line, empty ones and those after ``#`` aside; or a
            function that returns them.
        check: raises a ValueError for a URL that the run cannot use.

    Raises:
        ValueError: for URLs that stay if there is none, or one twice, or one that the run cannot use.
    """

    def __init__(self, servers: Listing, check: Callable[[str], object]) -> None:
        self._servers, self._check = servers, check
        self.fixed = not (callable(servers) or isinstance(servers, Path))
        if self.fixed:
            urls = self._urls()
            if not urls or len(set(urls)) < len(urls):
                raise ValueError(f"expected URLs of one or more servers, each of them once, got {urls}")
            self._check_each(urls)

    @property
    def source(self) -> str:
        """Where they are listed; empty for URLs that stay."""
        if self.fixed:
            return ""
        return str(getattr(self._servers, "__qualname__", self._servers))

    def read(self) -> tuple[str, ...]:
        """The URLs, each once.

        Raises:
            ValueError: if there is none, or not all of them can be used: such a list may be one that is being written.
        """
        try:
            urls = self._urls()
        except Exception as error:  # whatever a function raises, or a disk: the run goes on with those it has
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not urls:
            raise ValueError("expected URLs of one or more servers, got none")
        self._check_each(urls)
        return tuple(dict.fromkeys(urls))

    def _urls(self) -> list[str]:
        servers: Any = self._servers
        if callable(servers):
            servers = servers()
        elif isinstance(servers, Path):
            lines = [line.partition("#")[0].strip() for line in servers.read_text().splitlines()]
            servers = [line for line in lines if line]
        return [str(url).rstrip("/") for url in ([servers] if isinstance(servers, str) else servers)]

    def _check_each(self, urls: Sequence[str]) -> None:
        for url in urls:
            self._check(url)

    def wait(self, patience: float) -> tuple[str, ...]:
        """The first list that can be used.

        Raises:
            EngineError: if there is none within so many seconds.
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
    """Has a run go with the list of its servers: rank 0 reads it, and the others learn of it where ranks met.

    A list counts once two readings agree, so that one which is being written is none. One that cannot be used changes
    nothing, and the log says why.

    Args:
        members: the list.
        urls: those that the run began with.
        follow: called in a thread with the URLs of each list that differs from the one before.
        store: where ranks met; None for a process alone.
        name: of the list there.
        reads: whether this is rank 0.
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
        self._reading, self._said = (self._urls, ""), ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="servers-listed", daemon=True)
        if not members.fixed:
            self._thread.start()

    def close(self) -> None:
        """Reads no more; a function that does not return is left to itself."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LEAVING)

    def _watch(self) -> None:
        while not self._ended.wait(READ):
            urls = self._read() if self._reads else self._learn()
            if urls != self._urls and not self._ended.is_set():
                self._urls = urls
                self._follow(urls)
                if self._reads and self._store is not None:
                    self._store.set(self._name, "\n".join(urls))

    def _read(self) -> tuple[str, ...]:
        """What is listed, if that was so at the reading before; else what was taken."""
        before = self._reading
        try:
            self._reading = self._members.read(), ""
        except ValueError as error:
            self._reading = self._urls, quote(str(error))
        if self._reading != before:
            return self._urls
        urls, why = self._reading
        if why and why != self._said:
            LOG.warning("servers stay as they are, because %s cannot be used: %s", self._members.source, why)
        self._said = why
        return urls

    def _learn(self) -> tuple[str, ...]:
        """What rank 0 has taken; nothing new once it is gone, which others notice."""
        try:
            if self._store is not None and self._store.check([self._name]):
                return tuple(self._store.get(self._name).decode().split("\n"))
        except RuntimeError:
            self._ended.set()
        return self._urls
