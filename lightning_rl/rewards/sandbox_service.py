"""Sandbox service: runs untrusted code on remote machines, behind a URL.

The API is that of SandboxFusion: ``POST /run_code`` with a program, its stdin and its limits.

Source: Liu et al. 2024 (FullStack Bench), arXiv:2412.00535, appendix on SandboxFusion.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_rl.rewards.optional_imports import require
from lightning_rl.rewards.sandbox import Ending, SandboxResult, SandboxUnavailable
from lightning_rl.utils.arguments import check_counts, check_numbers

BUSY = (408, 409, 425, 429)
KILLED = 128 + 9
MAX_QUOTE = 200  # characters of an answer that a message quotes
STATUSES = ("Success", "Failed")  # of a program; any other status is an error of the service
ENDINGS: dict[str, Ending] = {"Finished": "exited", "TimeLimitExceeded": "too long"}


class BusyError(SandboxUnavailable):
    """A failed request that may succeed on retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxService:
    """Sandbox behind a URL, an alternative to the local :class:`Sandbox`.

    A request is retried after a broken connection or a status of 408, 409, 425, 429 or >= 500. Redirects are refused,
    because they would send the key to another host.

    Args:
        url: URL of the service, such as ``http://10.0.0.9:8080``, without ``/run_code``.
        key_file: File with the key, sent as ``Authorization: Bearer``; read at each request. None for a service without
            a key.
        seconds: Run time limit of a program.
        memory: Memory limit of a program in bytes; None for the default of the service.
        output: Maximum size of a program's output in bytes.
        patience: Seconds of a request beyond ``seconds``: transfer, queue and start.
        retries: Number of retries of a request.
        delay: Seconds before the first retry; doubles with each retry.

    Raises:
        ImportError: If httpx2 is not installed.
        ValueError: If an option is out of range or the URL is invalid.
    """

    url: str
    key_file: Path | None = None
    seconds: float = 5.0
    memory: int | None = None
    output: int = 2**16
    patience: float = 30.0
    retries: int = 3
    delay: float = 1.0

    def __post_init__(self) -> None:  # noqa: D105
        require("httpx2", extra="judge")
        check_numbers(above=0, finite=True, seconds=self.seconds, patience=self.patience)
        check_numbers(at_least=0, finite=True, delay=self.delay)
        check_counts(1, output=self.output)
        check_counts(2**20, optional=True, memory=self.memory)
        check_counts(0, retries=self.retries)
        if not _is_plain(self.url):
            raise ValueError("expected url to be one without a name, password or query, such as http://10.0.0.9:8080")
        if not isinstance(self.key_file, Path | None):
            raise ValueError("expected key_file to be the Path of a file that holds the key, or None")

    def check(self) -> None:
        """Run a test program.

        Raises:
            SandboxUnavailable: If the service fails to run a program within the limits.
            OSError: If the key cannot be read.
        """
        result = self.run("print(4)")
        if not (result.ok and result.stdout == "4\n"):
            raise SandboxUnavailable(
                f"expected {self.url} to run a program that prints a digit, got {result}: raise the limits, or check "
                "the service"
            )

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Run a Python program.

        Args:
            source: Source code of the program.
            stdin: Standard input of the program.

        Raises:
            SandboxUnavailable: If the service does not answer or reports an error.
            OSError: If the key cannot be read.
        """
        code, stdin = (text.encode(errors="replace").decode() for text in (source, stdin))  # without lone surrogates
        body: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin, "run_timeout": self.seconds}
        if self.memory is not None:
            body["memory_limit_MB"] = self.memory // 2**20
        for attempt in range(self.retries):
            try:
                return self._ask(body)
            except BusyError:
                time.sleep(self.delay * 2**attempt)
        return self._ask(body)

    def _ask(self, body: dict[str, Any]) -> SandboxResult:
        import httpx2

        url, begin = f"{self.url.rstrip('/')}/run_code", time.monotonic()
        timeout = self.seconds + self.patience
        try:
            response = httpx2.post(url, json=body, headers=self._headers(), timeout=timeout, follow_redirects=False)
        except httpx2.RequestError as error:
            raise BusyError(f"{url} did not answer: {type(error).__name__} {error}") from None
        if response.status_code != 200:
            kind = BusyError if response.status_code in BUSY or response.status_code >= 500 else SandboxUnavailable
            moved = ", a redirect that is not followed" if response.is_redirect else ""
            raise kind(f"{url} answered with status {response.status_code}{moved}: {_quote(response.content)}")
        return self._read(url, response.content, time.monotonic() - begin)

    def _read(self, url: str, content: bytes, seconds: float) -> SandboxResult:
        try:
            answer = json.loads(content)
            run = answer["run_result"] or {"status": answer["status"]}
            ending = ENDINGS.get(run["status"]) if answer["status"] in STATUSES else None
            out, err = (str(run[name] or "") for name in ("stdout", "stderr")) if ending else ("", "")
            code = int(run["return_code"]) if ending == "exited" else KILLED
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SandboxUnavailable(
                f"expected {url} to return the result of a program, got {_quote(content)}"
            ) from error
        if ending is None:
            raise BusyError(f"{url} reported an error: {_quote(content)}")
        if len(out.encode(errors="replace")) + len(err.encode(errors="replace")) > self.output:
            ending, out, err = "too much output", out[: self.output], err[: self.output]
        return SandboxResult(ending=ending, code=code, stdout=out, stderr=err, seconds=seconds)

    def _headers(self) -> dict[str, str]:
        return {} if self.key_file is None else {"Authorization": f"Bearer {self.key_file.read_text().strip()}"}


def _is_plain(url: str) -> bool:
    """Return True for a URL with only a scheme, a host, a port and a path."""
    parts = urlsplit(url)
    beyond = parts.username or parts.password or parts.query or parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not beyond


def _quote(content: bytes) -> str:
    return repr(content.decode(errors="replace")[:MAX_QUOTE])
