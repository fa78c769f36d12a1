"""Sums of two small numbers as a chat task, with a worked example; a reward reads the last number of a response."""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = range(2, 21)
EXAMPLE = (
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "3 + 4 = 7."},
)


def sums(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` distinct sums as chat prompts with their answers."""
    pairs = Random(seed).sample([(a, b) for a in NUMBERS for b in NUMBERS], count)
    return [
        {"prompt": [*EXAMPLE, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in pairs
    ]


def last_number_matches(
    completions: Sequence[Sequence[dict[str, str]]], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each message whose last number is the answer, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]
