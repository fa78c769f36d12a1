"""The program of a process that compares formulas by math-verify: JSON lines in, JSON lines out.

It imports nothing of the library, so it starts in a second, and it may hang, run out of memory or die: whoever started
it sees that and goes on. It ends when its input does.

In: ``[reference, text, seconds]``. Out: first ``"ready"``, then for each line whether the text states the reference, or
None if the reference is no mathematics.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MEMORY = 2 * 2**30  # bytes


class TooSlow(BaseException):  # sympy catches every Exception and goes on
    """The time of one comparison is over."""


def comparison() -> Callable[[str, str], bool | None]:
    """The function that compares a reference with a text."""
    from math_verify import parse, verify

    @lru_cache(maxsize=1024)
    def parse_reference(reference: str) -> list[Any]:
        return parse(reference, parsing_timeout=0)

    def compare(reference: str, text: str) -> bool | None:
        wanted = parse_reference(reference)
        return verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0) if wanted else None

    return compare


def answer(compare: Callable[[str, str], bool | None], reference: str, text: str, seconds: float) -> bool | None:
    """What the comparison says; False if it takes too long, or too much of anything else."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return compare(reference, text)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (TooSlow, RecursionError, MemoryError, ArithmeticError, ValueError, TypeError):
        return False


def main() -> None:
    """Answers line by line."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def stop(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for whoever started this
    compare = comparison()
    replies.write('"ready"\n')
    for line in sys.stdin.buffer:
        reference, text, seconds = json.loads(line)
        replies.write(json.dumps(answer(compare, reference, text, seconds)) + "\n")


if __name__ == "__main__":
    main()
