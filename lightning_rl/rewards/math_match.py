"""Reward for mathematically equivalent answers, by math-verify.

math-verify sets its time limit by a signal, which works only in a main thread, and sympy can hang on a short formula.
So separate processes compare, which any thread and any process can start.
"""

import json
import math
import os
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import IO, Any, cast

from typing_extensions import override

from lightning_rl.rewards import math_worker
from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference, warn_of_unreadable
from lightning_rl.rewards.optional_imports import require
from lightning_rl.utils.arguments import check_counts, check_numbers, check_text

STARTING = 120.0  # seconds until a process has imported sympy on a busy machine
DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
PLAIN = re.compile(r"\$-?[0-9]{1,3}(?:(?:,[0-9]{3}){1,2}|[0-9]{0,6})(?:\.[0-9]{1,6})?\$")
GRACE = 2.0  # seconds for a process to time out by itself


@dataclass(frozen=True, kw_only=True)
class MathMatch(AnswerMatch):
    r"""Math reward: 1 if a completion is mathematically equivalent to the reference, else 0.

    Of a completion, math-verify reads the last ``tail`` characters, or the text after the last ``marker`` in them, and
    looks for ``\boxed{}``, formulas between dollar signs and numbers. If either number is rounded, both are compared to
    six decimals. 9% equals both 9 and 0.09.

    A comparison that takes longer than ``timeout`` scores 0. The processes start at the first call and end with this
    object.

    Args:
        answer: Name of the column with the references: numbers, LaTeX, or whole answers of GSM8K.
        marker: Text that precedes the answer, in references and in completions.
        tail: Number of characters to read from the end.
        timeout: Time limit of one completion in seconds.
        processes: Number of processes that compare at the same time.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If an option is not positive.
    """

    marker: str = "####"
    tail: int = 4000
    timeout: float = 5.0
    processes: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        require("math_verify", extra="math")
        super().__post_init__()
        check_text(marker=self.marker)
        check_counts(1, tail=self.tail, processes=self.processes)
        check_numbers(above=0, finite=True, timeout=self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options only: a copy starts its own processes."""
        return {key: value for key, value in vars(self).items() if key != "workers"}

    @cached_property
    def workers(self) -> list["MathProcess"]:
        """Processes that compare, started on demand."""
        return [MathProcess() for _ in range(self.processes)]

    @override
    def compare(self, texts: Sequence[str], references: Sequence[Any]) -> list[float | None]:
        readable = [_is_mathematics(reference) for reference in references]
        rows = [row for row, fine in enumerate(readable) if fine]
        questions = [self.question(texts[row], references[row]) for row in rows]
        values: list[float | None] = [None] * len(texts)
        for row, answer in zip(rows, self._answers(questions), strict=True):
            values[row] = math.nan if answer is None else float(answer)
        for row, reference in enumerate(references):
            if reference is not None and not readable[row]:
                values[row] = math.nan
        unreadable = [
            UnreadableReference(f"expected a number or formula, got {reference!r:.200}")
            for value, reference in zip(values, references, strict=True)
            if value is not None and math.isnan(value)
        ]
        warn_of_unreadable(unreadable, column=self.answer, option="answer", reward=self)
        return values

    def _answers(self, questions: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Return the results of the comparisons, split among the processes; plain numbers are compared here."""
        answers = [_same_number(*question) for question in questions]
        rest = [number for number, answer in enumerate(answers) if answer is None]
        shares = [rest[start :: self.processes] for start in range(min(self.processes, len(rest)))]

        def work(worker: MathProcess, share: Sequence[int]) -> list[bool | None]:
            return worker.answers([questions[number] for number in share], self.timeout)

        with ThreadPoolExecutor(self.processes) as threads:
            for share, said in zip(shares, threads.map(work, self.workers, shares), strict=True):
                for number, answer in zip(share, said, strict=True):
                    answers[number] = answer
        return answers

    @override
    def score(self, text: str, reference: Any) -> float:
        value = self.compare([text], [reference])[0]
        return math.nan if value is None else value

    def question(self, text: str, reference: Any) -> tuple[str, str]:
        """Return the parts of reference and text that are compared."""
        text, marked, stated = text[-self.tail :].rpartition(self.marker)
        return _formula(str(reference)[-self.tail :].rpartition(self.marker)[2]), _formula(stated) if marked else stated


def _is_mathematics(reference: Any) -> bool:
    """Return True if a reference is a string or a number."""
    return isinstance(reference, str | Real | Decimal) and not isinstance(reference, bool)


def _formula(text: str) -> str:
    """Return the text between dollar signs, unless it marks formulas; else math-verify reads only numbers."""
    text = text.strip()
    return text if not text or any(mark in text for mark in DELIMITERS) else f"${text}$"


def _same_number(reference: str, text: str) -> bool | None:
    """Compare two numbers like math-verify; return None unless both are plain and short.

    With up to nine digits and six decimals, neither rounding nor float conversion changes the result.
    """
    if PLAIN.fullmatch(reference) and PLAIN.fullmatch(text):
        return Decimal(reference.strip("$").replace(",", "")) == Decimal(text.strip("$").replace(",", ""))
    return None


class MathProcess:
    """Process that compares, started on demand and restarted after it was killed."""

    def __init__(self) -> None:
        self.worker: subprocess.Popen[bytes] | None = None
        self._owner, self._buffer, self._lock = 0, b"", threading.Lock()

    def answers(self, questions: Sequence[tuple[str, str]], timeout: float) -> list[bool | None]:
        """Return the result for each pair of reference and text; False after a time-out."""
        with self._lock:
            return [self._answer(reference, text, timeout) for reference, text in questions]

    def _answer(self, reference: str, text: str, timeout: float) -> bool | None:
        worker = self._running()
        try:
            question = json.dumps([reference, text, timeout], ensure_ascii=False)
            cast(IO[bytes], worker.stdin).write(question.encode(errors="replace") + b"\n")
            return json.loads(self._line(worker, timeout + GRACE))
        except (OSError, TimeoutError):  # it died, or hangs in C code
            self._end()
            return False

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the worker; start one if there is none, it has ended, or it belongs to the parent of a fork."""
        if self.worker is not None and self._owner == os.getpid() and self.worker.poll() is None:
            return self.worker
        self._end()
        command = [sys.executable, "-P", str(Path(math_worker.__file__))]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        worker = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)
        self.worker, self._owner, self._buffer = worker, os.getpid(), b""
        weakref.finalize(self, _kill, worker, self._owner)
        try:
            self._line(worker, STARTING)
        except (OSError, TimeoutError) as error:
            self._end()
            raise RuntimeError(
                f"expected a process that imports math_verify to start, but {error}: run "
                f"{sys.executable} -c 'import math_verify' to see why"
            ) from error
        return worker

    def _line(self, worker: subprocess.Popen[bytes], seconds: float) -> bytes:
        output, deadline = cast(IO[bytes], worker.stdout), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"it did not answer within {seconds:g} s")
                chunk = output.read(65536)
                if not chunk:
                    raise ConnectionError("it exited at once")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _end(self) -> None:
        if self.worker is not None:
            _kill(self.worker, self._owner)
            self.worker = None


def _kill(worker: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a worker, but not in a fork of its owner, which still uses it."""
    if os.getpid() == owner:
        worker.kill()
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()
