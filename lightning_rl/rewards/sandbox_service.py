"""Sandbox service: runs untrusted code on remote machines, behind a URL.

The API is that of SandboxFusion: ``POST /run_code`` with a program, its stdin and its limits.

Source: Liu et al. 2024 (FullStack Bench), arXiv:2412.00535, appendix on SandboxFusion.
"""

import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_rl.processes.command import Ending, SandboxResult
from lightning_rl.rewards.sandbox import SandboxUnavailable
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.utils.http import Client, Refused, Unanswered, quote, read_url

KILLED = 128 + 9
DELAY = 1.0  # seconds before the first retry
STATUSES = ("Success", "Failed")  # of a program; any other status is an error of the service
ENDINGS: dict[str, Ending] = {"Finished": "exited", "TimeLimitExceeded": "too long"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxService:
    """Sandbox behind a URL, an alternative to the local :class:`Sandbox`.

    A request is retried without a usable answer, as after a broken connection or a status of 408, 429 or >= 500.
    Redirects are not followed, because they would send the key to another host.

    Args:
        url: URL of the service, such as ``http://10.0.0.9:8080``, without ``/run_code``.
        key_file: File with the key, sent as ``Authorization: Bearer``; read at each request. None for a service without
            a key.
        seconds: Run time limit of a program.
        memory: Memory limit of a program in bytes; None for the default of the service.
        patience: Seconds of a request beyond ``seconds``: transfer, queue and start.
        retries: Number of retries of a request, after a delay that doubles with each.

    Raises:
        ValueError: If an option is out of range or the URL is invalid.
    """

    url: str
    key_file: Path | None = None
    seconds: float = 5.0
    memory: int | None = None
    patience: float = 30.0
    retries: int = 3
    output: ClassVar[int] = 2**16  # maximum size of the output in bytes

    def __post_init__(self) -> None:  # noqa: D105
        check_numbers(above=0, finite=True, seconds=self.seconds, patience=self.patience)
        check_counts(2**20, optional=True, memory=self.memory)
        check_counts(0, retries=self.retries)
        read_url(self.url)
        if not isinstance(self.key_file, Path | None):
            raise ValueError("expected key_file to be the Path of a file that holds the key, or None")

    def check(self) -> None:
        """Run a test program.

        Raises:
            SandboxUnavailable: If the service fails to run a program within the limits.
            OSError: If the key cannot be read.
            ValueError: If the key has a character that no header can hold.
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
            ValueError: If the key has a character that no header can hold.
        """
        code, stdin = (text.encode(errors="replace").decode() for text in (source, stdin))  # without lone surrogates
        body: dict[str, Any] = {"code": code, "language": "python", "stdin": stdin, "run_timeout": self.seconds}
        if self.memory is not None:
            body["memory_limit_MB"] = self.memory // 2**20
        try:
            for attempt in range(self.retries):
                with suppress(Unanswered):
                    return self._ask(body)
                time.sleep(DELAY * 2**attempt)
            return self._ask(body)
        except (Refused, Unanswered) as error:
            raise SandboxUnavailable(str(error)) from None

    def _ask(self, body: dict[str, Any]) -> SandboxResult:
        key, begin = None if self.key_file is None else self.key_file.read_text().strip(), time.monotonic()
        with closing(Client(self.url, key)) as client:
            answer = client.call("POST", "/run_code", body, timeout=self.seconds + self.patience)
        return self._read(answer, time.monotonic() - begin)

    def _read(self, answer: Any, seconds: float) -> SandboxResult:
        try:
            run = answer["run_result"] or {"status": answer["status"]}
            ending = ENDINGS.get(run["status"]) if answer["status"] in STATUSES else None
            out, err = (str(run[name] or "") for name in ("stdout", "stderr")) if ending else ("", "")
            code = int(run["return_code"]) if ending == "exited" else KILLED
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            answer = quote(str(answer))
            raise SandboxUnavailable(f"expected {self.url} to return the result of a program, got {answer}") from error
        if ending is None:
            raise Unanswered(f"{self.url}/run_code reported an error: {quote(str(answer))}")
        if len(out.encode(errors="replace")) + len(err.encode(errors="replace")) > SandboxService.output:
            ending, out, err = "too much output", out[: SandboxService.output], err[: SandboxService.output]
        return SandboxResult(ending=ending, code=code, stdout=out, stderr=err, seconds=seconds)
