"""Sandbox service: runs code that nobody has read on machines of its own, behind a URL.

The service speaks as SandboxFusion does: ``POST /run_code`` with a program, what it reads, and its limits.

Source: Liu et al. 2024 (FullStack Bench), arXiv:2412.00535, appendix on SandboxFusion.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.key import read_key
from lightning_rl.rewards.extras import require
from lightning_rl.rewards.sandbox import Ending, SandboxResult, SandboxUnavailable, check_program

BUSY = (408, 409, 425, 429)
KILLED = 128 + 9
ESCAPED = 6  # bytes that JSON may take for one
ENVELOPE = 2**16  # bytes of an answer beside what a program printed
MAX_QUOTE = 200  # characters of an answer that a message quotes
STATUSES = ("Success", "Failed")  # of a program; any other one is the service's own
ENDINGS: dict[str, Ending] = {"Finished": "exited", "TimeLimitExceeded": "too long"}


class BusyError(SandboxUnavailable):
    """What may well be answered later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxService:
    """Runs Python programs in a sandbox behind a URL, in the place of a :class:`Sandbox` of this machine.

    A request that breaks off, or is answered with a status of 408, 409, 425, 429 or from 500 on, is sent again. A
    redirection is refused, since the key would go along.

    Args:
        url: of the service, such as ``http://10.0.0.9:8080``; ``/run_code`` is added.
        key_file: holds the key that is sent as ``Authorization: Bearer``; it is read at each request, and the file
            has to be its owner's alone. None for a service without one.
        seconds: that a program may run.
        memory: bytes that a program may have; None for what the service allows.
        output: bytes that a program may print.
        patience: seconds for a request beyond those of the program: for its way, its queue and the start.
        retries: how often a request is sent again.
        delay: seconds before the first of them; each later one waits twice as long.

    Raises:
        ImportError: if httpx2 is missing; the message says how to install it.
        ValueError: if an option is out of range or the URL is none.
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
        """Tries the service out.

        Raises:
            SandboxUnavailable: if it runs no program, or one within no such limits.
            ValueError: if the key cannot be read.
        """
        result = self.run("print(4)")
        if not (result.ok and result.stdout == "4\n"):
            raise SandboxUnavailable(
                f"expected {self.url} to run a program that prints a digit, got {result}: raise the limits, or look at "
                "the service"
            )

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Runs a Python program.

        Args:
            source: of the program.
            stdin: what it reads.

        Raises:
            SandboxUnavailable: if the service does not answer, or says that it failed itself.
            ValueError: if the key cannot be read, or one of both is no text, or one with halves of surrogate pairs.
        """
        check_program(source, stdin)
        body: dict[str, Any] = {"code": source, "language": "python", "stdin": stdin, "run_timeout": self.seconds}
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

        url, begin, content = f"{self.url.rstrip('/')}/run_code", time.monotonic(), b""
        end, limit = begin + self.seconds + self.patience, ESCAPED * self.output + ENVELOPE
        try:
            with httpx2.stream(
                "POST", url, json=body, headers=self._headers(), timeout=end - begin, follow_redirects=False
            ) as response:
                for chunk in response.iter_raw():
                    content += chunk
                    if len(content) > limit and response.status_code != 200:
                        break
                    if len(content) > limit:
                        return SandboxResult(
                            ending="too much output",
                            code=KILLED,
                            stdout="",
                            stderr="",
                            seconds=time.monotonic() - begin,
                        )
                    if time.monotonic() > end:
                        raise BusyError(f"{url} did not answer within {end - begin:g} s")
        except httpx2.RequestError as error:
            raise BusyError(f"{url} did not answer: {type(error).__name__} {error}") from None
        if response.status_code != 200:
            kind = BusyError if response.status_code in BUSY or response.status_code >= 500 else SandboxUnavailable
            moved = ", which is not followed" if response.is_redirect else ""
            raise kind(f"{url} answered with status {response.status_code}{moved}: {_quote(content)}")
        return self._read(url, content, time.monotonic() - begin)

    def _read(self, url: str, content: bytes, seconds: float) -> SandboxResult:
        try:
            answer = json.loads(content)
            run = answer["run_result"] or {"status": answer["status"]}
            ending = ENDINGS.get(run["status"]) if answer["status"] in STATUSES else None
            out, err = (_text(run, name) for name in ("stdout", "stderr")) if ending else ("", "")
            code = _number(run, "return_code") if ending == "exited" else KILLED
            size = len(out.encode(errors="replace")) + len(err.encode(errors="replace"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SandboxUnavailable(
                f"expected {url} to say what became of a program, got {_quote(content)}"
            ) from error
        if ending is None:
            raise BusyError(f"{url} failed itself: {_quote(content)}")
        if size > self.output:
            ending, out, err = "too much output", out[: self.output], err[: self.output]
        return SandboxResult(ending=ending, code=code, stdout=out, stderr=err, seconds=seconds)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}  # what is compressed may be of any size
        if self.key_file is None:
            return headers
        return {**headers, "Authorization": f"Bearer {read_key(self.key_file)}"}


def _is_plain(url: Any) -> bool:
    """Whether a URL is a scheme, a host, a port and a path of printable characters, and no more."""
    try:
        parts = urlsplit(url)
        beyond = parts.username or parts.password or parts.query or parts.fragment or (parts.port == 0)
        plain = url.isascii() and url.isprintable() and " " not in url
        return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and not beyond
    except (ValueError, AttributeError, TypeError):
        return False


def _text(run: dict[str, Any], name: str) -> str:
    """What a program printed; ``null`` is nothing.

    Raises:
        LookupError: if the service does not say.
        TypeError: if it is no text.
    """
    text = run[name]
    if not isinstance(text, str | None):
        raise TypeError(f"expected {name} to be a text, got {type(text).__name__}")
    return text or ""


def _number(run: dict[str, Any], name: str) -> int:
    """A whole number that the service says.

    Raises:
        LookupError: if it does not.
        TypeError: if it is none.
    """
    number = run[name]
    if type(number) is not int:  # a bool is none
        raise TypeError(f"expected {name} to be a whole number, got {number!r:.200}")
    return number


def _quote(content: bytes) -> str:
    return repr(content.decode(errors="replace")[:MAX_QUOTE])
