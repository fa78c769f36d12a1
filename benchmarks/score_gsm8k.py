"""Accuracy and speed of the number and the math reward on gold and perturbed answers of GSM8K.

    python benchmarks/score_gsm8k.py                 # the rows that come with the repository
    python benchmarks/score_gsm8k.py FOLDER          # train.jsonl and test.jsonl of the whole set, 8792 rows

For each reward: how many of the gold answers score 1, how many of the perturbed ones 0, and the CPU seconds for 10,000
in this process, which compares all of these numbers.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from lightning_rl.rewards import MathMatch, NumberMatch, Reward

BUNDLED = Path(__file__).resolve().parents[1] / "recipes" / "data" / "gsm8k"
SAMPLES = 10_000


def gold_answers(folder: Path) -> list[str]:
    """Return the answers of train.jsonl and test.jsonl, solutions included."""
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    return [json.loads(line)["answer"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def number_of(answer: str) -> Decimal:
    """Return the number after the marker, independently of the rewards' code."""
    return Decimal(answer.rpartition("####")[2].strip().replace(",", ""))


GOLD: dict[str, Callable[[str], str]] = {
    "whole": lambda answer: answer,
    "boxed": lambda answer: rf"So we get \boxed{{{number_of(answer)}}}.",
    "sentence": lambda answer: f"The answer is {number_of(answer):,}.",
    "dollars": lambda answer: f"#### ${number_of(answer):,.2f}",
    "fraction": lambda answer: rf"\boxed{{\frac{{{3 * number_of(answer)}}}{{3}}}}",
}
PERTURBED: dict[str, Callable[[Decimal], Decimal]] = {
    "one more": lambda number: number + 1,
    "one less": lambda number: number - 1,
    "a half more": lambda number: number + Decimal("0.5"),
    "a thousandth more": lambda number: number + Decimal("0.001"),
    "the other sign": lambda number: -number if number else Decimal(7),
    "a digit more": lambda number: number * 10 + 7,
    "a digit less": lambda number: number // 10 if number else Decimal(7),
}


def perturbed(answer: str, change: Callable[[Decimal], Decimal], *, boxed: bool) -> str:
    """Return the answer with another number, after its marker or in a box."""
    number = change(number_of(answer))
    return rf"So we get \boxed{{{number}}}." if boxed else f"{answer.rpartition('####')[0]}#### {number}"


def share(reward: Reward, completions: Sequence[str], answers: Sequence[str], wanted: float) -> tuple[int, float]:
    """Return the number of completions with the expected value, and the CPU seconds."""
    begin = time.process_time()
    ids: list[Any] = [[]] * len(answers)
    values = reward([""] * len(answers), completions, completion_ids=ids, answer=answers)
    return sum(value == wanted for value in values), time.process_time() - begin


def report(name: str, reward: Reward, answers: Sequence[str]) -> bool:
    """Print what a reward says; whether all of it is right."""
    cases = [("gold", kind, [write(answer) for answer in answers], 1.0) for kind, write in GOLD.items()]
    for kind, change in PERTURBED.items():
        for boxed in (False, True):
            completions = [perturbed(answer, change, boxed=boxed) for answer in answers]
            cases.append(("perturbed", f"{kind}, boxed" if boxed else kind, completions, 0.0))
    right = True
    for group, kind, completions, wanted in cases:
        count, seconds = share(reward, completions, answers, wanted)
        per_sample = seconds / len(answers)
        print(f"{name} {group}={count}/{len(answers)} ({kind}) cpu_seconds={per_sample * SAMPLES:.2f} for {SAMPLES}")
        right = right and count == len(answers)
    return right


def main(folder: str = str(BUNDLED)) -> None:
    """Print the table; exits with 1 if anything in it is wrong."""
    answers = gold_answers(Path(folder))
    right = [report("number", NumberMatch(), answers), report("math", MathMatch(), answers)]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
