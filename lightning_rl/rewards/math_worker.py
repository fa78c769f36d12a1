"""Program of a process that compares formulas by math-verify; reads and writes JSON lines.

It imports nothing of the library, so it starts in a second; it may hang, run out of memory or crash. It exits at the
end of its input.

Input: ``[reference, text, seconds]``. Output: ``"ready"``, then for each line true, false, or null if the reference is
not mathematics.
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


class TooSlow(BaseException):  # BaseException, because sympy catches Exception
    """Time limit of one comparison exceeded."""


def comparison() -> Callable[[str, str], bool | None]:
    """Return the function that compares a reference with a text."""
    from math_verify import parse, verify

    @lru_cache(maxsize=1024)
    def parse_reference(reference: str) -> list[Any]:
        return parse(reference, parsing_timeout=0)

    def compare(reference: str, text: str) -> bool | None:
        wanted = parse_reference(reference)
        return verify(wanted, parse(text, parsing_timeout=0), timeout_seconds=0) if wanted else None

    return compare


def answer(compare: Callable[[str, str], bool | None], reference: str, text: str, seconds: float) -> bool | None:
    """Return the result of the comparison; False if it exceeds its time or any other resource."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return compare(reference, text)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (TooSlow, RecursionError, MemoryError, ArithmeticError, ValueError, TypeError):
        return False


def main() -> None:
    """Answer line by line."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep prints of libraries out of the replies
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def stop(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    compare = comparison()
    replies.write('"ready"\n')
    for line in sys.stdin.buffer:
        reference, text, seconds = json.loads(line)
        replies.write(json.dumps(answer(compare, reference, text, seconds)) + "\n")


if __name__ == "__main__":
    main()
