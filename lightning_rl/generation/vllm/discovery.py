"""URLs of a run's servers, which a file or a function may change during the run."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.group import call_in_thread
from lightning_rl.utils.http import quote, read_url

LOG = logging.getLogger(__name__)
READ = 1.0  # seconds between two reads
LEAVING = 5.0  # seconds that the end of a run waits for the function that lists servers

Listing = str | Sequence[str] | Path | Callable[[], Iterable[str]]
Urls = tuple[str, ...]


class ServerList:
    """URLs of the servers of a run.

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

    def read(self) -> Urls:
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
            if servers.exists() and not servers.is_file():  # opening a pipe would wait for its other end
                raise ValueError(f"expected a file of URLs, got {servers}, which is a pipe or a device")
            lines = (line.partition("#")[0].strip() for line in servers.read_text().splitlines())
            return [line for line in lines if line]
        if callable(servers):
            servers = servers()
        return [servers] if isinstance(servers, str) else servers

    def wait(self, patience: float) -> Urls:
        """Return the first usable list.

        Raises:
            EngineError: If there is none within ``patience`` seconds.
        """
        end, logged = time.monotonic() + patience, ""
        while True:
            try:
                return self.read()
            except ValueError as error:
                why = quote(str(error))
            if time.monotonic() >= end:
                raise EngineError(f"expected servers to be listed by {self.source} within {patience:g} s: {why}")
            if why != logged:
                LOG.warning("waiting up to %g s for servers to be listed by %s: %s", patience, self.source, why)
                logged = why
            time.sleep(min(READ, patience))

    async def changes(self, urls: Urls) -> AsyncIterator[Urls]:
        """Yield each changed list, in the event loop, unless the URLs are fixed.

        A list is used once two reads agree, which excludes a list that is being written. An unusable list changes
        nothing and is logged. The end waits for the function that lists servers; one that does not return is abandoned.

        Args:
            urls: URLs at the start of the run.
        """
        used, before, logged = urls, urls, ""
        while not self.fixed:
            await asyncio.sleep(READ)
            reading = asyncio.wrap_future(call_in_thread(self.read))
            try:
                await asyncio.wait([reading])
            finally:
                await asyncio.wait([reading], timeout=LEAVING)
            try:
                found, why = reading.result(), ""
            except ValueError as error:
                found, why = used, quote(str(error))
            if why and why != logged:
                LOG.warning("servers stay as they are, because the list of %s is unusable: %s", self.source, why)
            stable, before, logged = set(found) == set(before), found, why
            if stable and set(found) != set(used):
                used = found
                yield used
