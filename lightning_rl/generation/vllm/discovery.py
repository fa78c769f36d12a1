"""URLs of a run's servers, which a file or a function may change during the run."""

import io
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from itertools import islice
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.http import Address, quote

LOG = logging.getLogger(__name__)
READ = 1.0  # seconds between two reads
SLOW = 10.0  # seconds of a read after which the log warns
MAX_BYTES, MAX_SERVERS = 2**20, 2**12  # limits of a list
LEAVING = 5.0  # seconds that the end of a run waits for the function that lists servers

Listing = str | Sequence[str] | Path | Callable[[], Iterable[str]]
Lines = list[tuple[str, object]]  # position in the list, for messages, and entry


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
        self._reading: futures.Future[Lines] | None = None
        if self.fixed:
            lines = self._lines()
            if not lines or len(self._urls(lines)) < len(lines):
                raise ValueError(
                    f"expected URLs of one or more servers, each of them once, got {[line for _, line in lines]}"
                )

    @property
    def source(self) -> str:
        """Name of the file or the function; empty for fixed URLs."""
        if self.fixed:
            return ""
        return str(getattr(self._servers, "__qualname__", self._servers))

    def read(self, within: float = SLOW) -> tuple[str, ...]:
        """Return the URLs, normalized and without repetitions.

        A read that takes longer than ``within`` seconds continues in its thread, and the next call waits for it.

        Raises:
            ValueError: If there is no list in time, or an entry is unusable, as in a list that is being written.
        """
        if self._reading is None:
            self._reading = futures.Future()
            threading.Thread(target=self._fill, args=(self._reading,), name="servers-read", daemon=True).start()
        if not futures.wait([self._reading], within).done:
            raise ValueError(f"no list within {within:.2g} s so far")
        reading, self._reading = self._reading, None
        return self._urls(reading.result())

    def _fill(self, reading: "futures.Future[Lines]") -> None:
        try:
            reading.set_result(self._lines())
        except BaseException as error:  # noqa: BLE001  any error of function or disk: the run keeps its servers
            reading.set_exception(ValueError("".join(format_exception_only(error)).strip()))

    def _lines(self) -> Lines:
        """Return the entries with their positions."""
        servers: Any = self._servers
        if isinstance(servers, Path):
            with servers.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES} bytes, got more")
            lines = [line.partition("#")[0].strip() for line in io.StringIO(text.decode("utf-8-sig"), newline=None)]
            return [(f"line {number}: ", line) for number, line in enumerate(lines, 1) if line]
        if callable(servers):
            servers = servers()
        urls = list(islice([servers] if isinstance(servers, str) else servers, MAX_SERVERS + 1))
        if len(urls) > MAX_SERVERS:
            raise ValueError(f"expected at most {MAX_SERVERS} servers, got more")
        return [("", url) for url in urls]

    def _urls(self, lines: Lines) -> tuple[str, ...]:
        if not lines:
            raise ValueError("expected URLs of one or more servers, got none")
        urls = list[str]()
        for place, line in lines:
            try:
                urls.append(str(Address.read(str(line))))
                self._check(urls[-1])
            except ValueError as error:
                raise ValueError(f"{place}{error}") from error
        return tuple(dict.fromkeys(urls))

    def wait(self, patience: float) -> tuple[str, ...]:
        """Return the first usable list.

        Raises:
            EngineError: If there is none within ``patience`` seconds.
        """
        end, said, why = time.monotonic() + patience, "", ""
        self._reading = None  # of an earlier run
        while True:
            try:
                return self.read(min(SLOW, max(0.0, end - time.monotonic())))
            except ValueError as error:
                if self._reading is None or not why:  # keep the more informative reason of the previous read
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
        self._reading, self._said = (self._urls, ""), ""
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
            urls = self._read() if self._reads else self._learn()
            if set(urls) != set(self._urls) and not self._ended.is_set():
                self._urls = urls
                self._follow(urls)
                if self._reads and self._store is not None:
                    self._store.set(self._name, "\n".join(urls))

    def _read(self) -> tuple[str, ...]:
        """Return the list if it equals the previous read, else the URLs in use."""
        (before, was), (urls, why) = self._reading, self._next()
        self._reading = urls, why
        if was and why and (not self._said or was == why != self._said):  # changing reasons are logged once
            LOG.warning("servers stay as they are, because the list of %s is unusable: %s", self._members.source, why)
            self._said = why
        if was or why:
            return self._urls
        self._said = ""
        return urls if set(urls) == set(before) else self._urls

    def _next(self) -> tuple[tuple[str, ...], str]:
        """Return the list and the reason if it is unusable."""
        try:
            return self._members.read(SLOW), ""
        except ValueError as error:
            return self._urls, quote(str(error))

    def _learn(self) -> tuple[str, ...]:
        """Return the URLs that rank 0 uses; stop if its store is gone."""
        try:
            if self._store is not None and self._store.check([self._name]):
                return tuple(self._store.get(self._name).decode().split("\n"))
        except RuntimeError:
            self._ended.set()
        return self._urls
