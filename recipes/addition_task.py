"""Sums of three numbers in a chat: the task of `laptop.py`.

The chat begins with a worked example, ``3 + 4 + 6`` in two steps. A response is right if its last number is the sum.
"""

from itertools import product
from random import Random

from lightning_rl.rewards import NumberMatch

NUMBERS = range(2, 10)
HELD_OUT_SUMS = 12
EXAMPLE = (
    {"role": "user", "content": "What is 3 + 4 + 6?"},
    {"role": "assistant", "content": "3 + 4 = 7. 7 + 6 = 13."},
)

last_number = NumberMatch(markers=())


def addition_prompts() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return every question with its answer, for training and held out, always the same.

    All orders of the same three numbers are on the same side.
    """
    training, held_out = list[dict[str, object]](), list[dict[str, object]]()
    sums = sorted({tuple(sorted(numbers)) for numbers in product(NUMBERS, repeat=3)} - {(3, 4, 6)})
    chosen = set(Random(0).sample(sums, HELD_OUT_SUMS))
    for numbers in product(NUMBERS, repeat=3):
        question = f"What is {' + '.join(map(str, numbers))}?"
        row: dict[str, object] = {"prompt": [*EXAMPLE, {"role": "user", "content": question}], "answer": sum(numbers)}
        (held_out if tuple(sorted(numbers)) in chosen else training).append(row)
    return training, held_out
