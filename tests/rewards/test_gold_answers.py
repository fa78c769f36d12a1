"""Gold answers in the styles of MATH, GSM8K, AIME, DeepScaleR and Numina: right against themselves, wrong else."""

import random
from collections.abc import Callable

import pytest

from lightning_rl.rewards import MathMatch

draw = random.Random(0)
PER_STYLE = 7


def number(lowest: int, highest: int) -> int:
    return draw.randint(lowest, highest)


STYLES: dict[str, Callable[[], str]] = {
    "int": lambda: str(number(-999, 9999)),
    "thousands": lambda: f"{number(1000, 9999999):,}",
    "latex-thousands": lambda: f"{number(1000, 9999999):,}".replace(",", draw.choice([r",\!", "{,}"])),
    "aime": lambda: f"{number(0, 999):03d}",
    "decimal": lambda: f"{number(0, 999)}.{number(1, 99):02d}",
    "leading-point": lambda: f".{number(1, 999)}",
    "frac": lambda: rf"\frac{{{number(1, 30)}}}{{{number(2, 31)}}}",
    "dfrac": lambda: rf"-\dfrac{{{number(1, 30)}}}{{{number(2, 31)}}}",
    "fracshort": lambda: rf"\frac{number(1, 9)}{number(2, 9)}",
    "mixed": lambda: rf"{number(1, 9)}\frac{{{number(1, 4)}}}{{{number(5, 9)}}}",
    "slash": lambda: f"{number(1, 30)}/{number(2, 31)}",
    "sqrt": lambda: rf"{number(2, 9)}\sqrt{{{draw.choice([2, 3, 5, 6, 7, 10, 11, 13])}}}",
    "sum-sqrt": lambda: rf"{number(1, 9)}+\sqrt{{{draw.choice([2, 3, 5, 6, 7])}}}",
    "frac-sqrt": lambda: rf"\frac{{{number(1, 9)}\sqrt{{{draw.choice([2, 3, 5, 7])}}}}}{{{number(2, 9)}}}",
    "pi": lambda: rf"{number(2, 99)}\pi",
    "frac-pi": lambda: rf"\frac{{{number(1, 9)}\pi}}{{{number(2, 12)}}}",
    "tuple": lambda: f"({number(-9, 9)}, {number(-9, 9)})",
    "triple": lambda: rf"\left({number(-9, 9)}, \frac{{1}}{{{number(2, 9)}}}, {number(-9, 9)}\right)",
    "interval": lambda: f"[{number(-9, 0)},{number(1, 9)})",
    "interval-inf": lambda: rf"(-\infty, {number(-9, 9)}]",
    "union": lambda: rf"(-\infty, {number(-9, 0)}) \cup ({number(1, 9)}, \infty)",
    "list": lambda: f"{number(-9, -1)}, {number(1, 9)}",
    "list-nospace": lambda: f"{number(-9, -1)},{number(1, 99)}",
    "set": lambda: rf"\{{{number(-9, -1)}, {number(1, 9)}\}}",
    "poly": lambda: f"x^{number(2, 5)}+{number(2, 9)}x-{number(1, 9)}",
    "poly2": lambda: f"{number(2, 9)}x^2 - {number(2, 9)}xy + y^2",
    "factored": lambda: f"(x-{number(1, 9)})(x+{number(1, 9)})",
    "eq": lambda: f"y = {number(2, 9)}x + {number(1, 9)}",
    "xeq": lambda: f"x = {number(2, 999)}",
    "complex": lambda: f"{number(1, 9)}+{number(2, 9)}i",
    "deg": lambda: rf"{number(1, 359)}^\circ",
    "deg2": lambda: rf"{number(1, 359)}^{{\circ}}",
    "percent": lambda: rf"{number(1, 99)}\%",
    "money": lambda: rf"\${number(1, 999)}.{number(10, 99)}",
    "money2": lambda: f"${number(1, 999)}",
    "unit-text": lambda: (
        rf"{number(1, 99)}\text{{ {draw.choice(['cm', 'inches', 'square units', 'feet', 'hours', 'meters'])}}}"
    ),
    "unit-plain": lambda: (
        f"{number(1, 99)} {draw.choice(['cm', 'inches', 'minutes', 'dollars', 'students', 'square feet'])}"
    ),
    "unit-mbox": lambda: rf"{number(1, 99)}\mbox{{ cm}}^2",
    "text": lambda: (
        rf"\text{{{draw.choice(['Evelyn', 'Monday', 'ellipse', 'even', 'odd', 'Yes', 'No', 'neither', 'circle'])}}}"
    ),
    "words": lambda: draw.choice(["Alice", "Tuesday", "hyperbola", "true", "false", "parabola", "yes", "no solution"]),
    "choice": lambda: rf"\text{{({draw.choice('ABCDE')})}}",
    "choice2": lambda: draw.choice("FGHJ"),
    "textbf": lambda: rf"\textbf{{({draw.choice('ABCDE')})}}",
    "matrix": lambda: (
        rf"\begin{{pmatrix}} {number(-9, 9)} & {number(-9, 9)} \\ {number(-9, 9)} & {number(-9, 9)} \end{{pmatrix}}"
    ),
    "vector": lambda: rf"\begin{{pmatrix}}{number(-9, 9)}\\{number(-9, 9)}\end{{pmatrix}}",
    "base": lambda: f"{number(1, 2)}{number(0, 2)}{number(0, 2)}_{draw.choice([3, 4, 5, '{7}'])}",
    "power": lambda: f"{number(2, 9)}^{{{number(10, 30)}}}",
    "sci": lambda: rf"{number(1, 9)}.{number(1, 9)} \times 10^{{{number(3, 9)}}}",
    "log": lambda: rf"\log_{{{number(2, 9)}}} {draw.choice([11, 13, 17, 19])}",
    "ln": lambda: rf"\ln {number(2, 30)}",
    "exp": lambda: f"e^{{{number(2, 9)}}}",
    "binom": lambda: rf"\binom{{{number(10, 20)}}}{{{number(2, 6)}}}",
    "fact": lambda: f"{number(5, 12)}!",
    "ineq": lambda: f"x > {number(2, 30)}",
    "ineq2": lambda: rf"{number(-9, 0)} \le x \le {number(1, 9)}",
    "pm": lambda: rf"\pm {number(2, 30)}",
    "ratio": lambda: f"{number(1, 9)}:{number(10, 19)}",
    "numina": lambda: rf"${number(2, 99)}$",
    "numina2": lambda: rf"$x_1={number(2, 9)}, x_2={number(10, 19)}$",
    "or": lambda: rf"{number(1, 9)} \text{{ or }} {number(10, 19)}",
    "and": lambda: f"{number(1, 9)} and {number(10, 19)}",
    "func": lambda: rf"\sin {number(10, 80)}^\circ",
    "n-expr": lambda: rf"\frac{{n(n+{number(1, 9)})}}{{2}}",
    "pow-n": lambda: f"2^{{n-{number(1, 9)}}}+{number(1, 9)}",
    "mod": lambda: rf"{number(1, 6)} \pmod{{{number(7, 11)}}}",
    "infty": lambda: r"\infty",
    "abs": lambda: rf"{number(2, 9)}|x|",
    "sqrt-n": lambda: rf"\sqrt[3]{{{number(2, 30)}}}",
    "time": lambda: f"{number(1, 12)}:{number(10, 59)}",
    "time-pm": lambda: rf"{number(1, 12)}:{number(10, 59)} \text{{ p.m.}}",
    "amc": lambda: rf"\textbf{{({draw.choice('ABCDE')})}}\ {number(2, 999)}",
    "amc-mathrm": lambda: rf"(\mathrm{{{draw.choice('ABCDE')}}}) \frac{{{number(1, 9)}}}{{{number(10, 19)}}}",
    "unit-mathrm": lambda: (
        rf"{number(1, 99)}\ \mathrm{{{draw.choice(['m/s', 'kJ', 'GB', 'kW', 'mol', 'Hz', 'eV', 'N', 'mA'])}}}"
    ),
    "unit-symbol": lambda: f"{number(1, 99)} {draw.choice(['m/s', 'kJ', 'km/h', 'W', 'V', 'kg', 'mL', 'cm^2', 'm^3'])}",
    "unit-inside": lambda: rf"\text{{{number(1, 99)} {draw.choice(['apples', 'hours', 'cups', 'a.m.', 'pm'])}}}",
    "time-am": lambda: f"{number(1, 12)}:{number(10, 59)} {draw.choice(['a.m.', 'p.m.'])}",
    "celsius": lambda: rf"{number(-20, 99)}^\circ\text{{{draw.choice('CF')}}}",
    "currency": lambda: draw.choice(["\u00a3", "\u20ac", "\u00a5", "\u20b9", "USD "]) + str(number(1, 999)),
    "permille": lambda: rf"0.{number(1, 9)}\%",
    "repeating": lambda: rf"{number(0, 9)}.{number(0, 9)}\overline{{{number(1, 8)}}}",
    "mixed-plain": lambda: f"{number(1, 9)} {number(1, 4)}/{number(5, 9)}",
    "space-thousands": lambda: f"{number(1000, 9999999):,}".replace(",", " "),
    "vulgar": lambda: str(number(1, 99)) + draw.choice("\u00bd\u00bc\u00be\u2153"),
    "statement": lambda: f"The answer is {number(2, 999)}",
    "empty-set": lambda: r"\varnothing",
    "unicode": lambda: f"{number(2, 9)}\u221a{draw.choice([2, 3, 5, 7])}",
    "degrees-inside": lambda: rf"\cos {number(10, 80)}^\circ",
    "cases": lambda: rf"\begin{{cases}}x={number(1, 9)}\\y={number(10, 19)}\end{{cases}}",
    "gsm": lambda: f"He has {number(2, 9)} + 3 = <<2+3=5>>5 apples.\n#### {number(2, 9999):,}",
}
FORMS: dict[str, Callable[[str], str]] = {
    "box": lambda gold: rf"So \boxed{{{bare(gold)}}}.",
    "hash": lambda gold: f"so\n#### {answer_of(gold)}",
    "sentence": lambda gold: f"Hence the final answer is {answer_of(gold)}.",
    "formula": lambda gold: f"Thus the answer is ${bare(gold)}$.",
}


def answer_of(gold: str) -> str:
    return gold.rpartition("#### ")[2]


def bare(gold: str) -> str:
    answer = answer_of(gold)
    return answer.strip("$") if answer.count("$") == 2 else answer


def golds() -> list[str]:
    """Different gold answers of every style."""
    return [gold for style in STYLES.values() for gold in list(dict.fromkeys(style() for _ in range(40)))[:PER_STYLE]]


@pytest.mark.nightly
def test_a_gold_answer_is_right_against_itself_and_wrong_against_the_next() -> None:
    answers, pairs = golds(), list[tuple[str, str, float]]()
    for gold, other in zip(answers, answers[1:] + answers[:1], strict=True):
        for name, form in FORMS.items():
            if name != "formula" or "$" not in bare(gold):
                pairs += [(form(gold), gold, 1.0), (form(gold), other, 0.0)]
    values = MathMatch()(["?"] * len(pairs), [pair[0] for pair in pairs], answer=[pair[1] for pair in pairs])
    assert len(pairs) > 3000
    assert [pair for pair, value in zip(pairs, values, strict=True) if value != pair[2]] == []
