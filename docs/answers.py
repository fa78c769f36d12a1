"""Write the table of answers in docs/rewards.md by running the rewards. Run ``python docs/answers.py``."""

import math
import warnings
from pathlib import Path
from typing import Any

from lightning_rl.rewards import ChoiceMatch, MathMatch, NumberMatch

PAGE = Path(__file__).with_name("rewards.md")
BEGIN, END = "<!-- docs/answers.py writes what follows -->\n", "<!-- up to here -->\n"
HEAD = """| completion | reference | `NumberMatch()` | `MathMatch()` |
|---|---|---|---|
"""
CHOICES_HEAD = """| completion | reference | `ChoiceMatch()` |
|---|---|---|
"""
ANSWERS = (
    ("It is $1,042.00.", "1042"),
    ("42 or 43", "42"),
    ("Answer: 42 or 43", "42"),
    (r"\boxed{41, 42}", "42"),
    ("The answer is 42, not 43.", "42"),
    ("#### 42", "... #### 42"),
    ("#### 42 clips", "42"),
    (r"So \boxed{3}. Wait, \boxed{4}.", "4"),
    (r"\boxed{5} so \boxed{6", "5"),
    (r"\fbox{4}", "4"),
    ("The answer is 6 * 7 = 42.", "42"),
    ("La respuesta correcta es 42.", "42"),
    ("Answer (in cm): 42. See step 3", "42"),
    (r"\boxed{42} and \boxed{43}", "42, 43"),
    (r"\boxed{42}", "The answer is 42"),
    (r"\boxed{42}", r"\textbf{(D)}\ 42"),
    (r"\boxed{D}", r"\textbf{(D)}\ 42"),
    ("42</think> 43", "42"),
    (r"\boxed{32348}", r"\$32,\!348"),
    (r"\boxed{0,111}", "0.111"),
    (r"\boxed{1e3}", "1000"),
    ("Answer: 1 000", "1000"),
    ("Answer: \u20ac1.234,56", "1234.56"),
    ("Answer: 1.5 million", "1500000"),
    ("Answer:\n\\[\n42\n\\]", "42"),
    ('{"answer": "42", "steps": 3}', "42"),
    (r"\boxed{3,14}", "3.14"),
    (r"\boxed{1.5 x 10^-3}", "0.0015"),
    ("The answer is minus 5.", "-5"),
    ("Answer: at least 42", "42"),
    ("Answer: - 5", "-5"),
    ("- 5", "5"),
    ("Answer: 42 = 6 * 7", "42"),
    ("Answer: 41 = 42", "42"),
    ("Answer: about 42", "42"),
    (r"\boxed{10K}", "10"),
    (r"\boxed{0.\overline{3}}", "1/3"),
    (r"\boxed{5 1/2}", "5.5"),
    ("33%", "0.33"),
    ("33%", "33"),
    ("0.333333", "1/3"),
    (r"\boxed{\frac{2}{6}}", r"\frac{1}{3}"),
    (r"\boxed{3\sqrt{2}}", "3"),
    (r"\boxed{15k+1}", "15"),
    (r"\boxed{2\sqrt{3} \approx 3.46}", r"2\sqrt{3}"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{(1, 2)}", "(1,\n2)"),
    (r"\boxed{2, 1}", "1 and 2"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{5}", "5 ft"),
    (r"\boxed{5 \text{ hours}}", "5 minutes"),
    (r"\boxed{5 \text{ feet}}", "5 ft"),
    (r"\boxed{5 \text{ km/h}}", r"5\ \mathrm{m/s}"),
    (r"\boxed{4 \text{ p.m.}}", "4 am"),
    (r"\boxed{5\%}", r"\$5"),
    (r"\boxed{5 \text{ apples}}", "5 pears"),
    (r"\boxed{300 \text{ s}}", "5 minutes"),
    (r"\boxed{101_2}", "101_3"),
    (r"\boxed{101_2}", "5"),
    (r"\boxed{5 \mod 7}", r"5 \mod 8"),
    (r"\boxed{-3 \le x \le 5}", "[-3,5]"),
    (r"\boxed{(1, 2)}", r"\{x : 1 < x < 2\}"),
    (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{0}", r"1.6 \times 10^{-19}"),
    (r"\boxed{\text{Friday}}", "Friday"),
    ("42", "forty two"),
    ("42", "n/a"),
)
CHOICES = (
    ("B", "B"),
    ("I choose B)36", "B)36"),
    (r"\boxed{\mathrm{b}}", "B"),
    ("First answer: A. On reflection, the answer is b.", "B"),
    ("\u6545\u9009\uff1aB", "B"),
    ("La respuesta es B.", "B"),
    ("The answer is B or C.", "B"),
    (r"\boxed{\text{A, B}}", "B"),
    (r"\boxed{\text{A, B}}", "AB"),
    ("The best choice is B.", "B"),
    ("B is the answer.", "B"),
    ("The answer is not A but B.", "B"),
    ("I choose option B because A is wrong.", "B"),
    ('{"answer": "B"}', "B"),
    ("Answer: A dog is an animal", "A"),
    ("B", "a whale"),
)


def value_of(reward: Any, completion: str, reference: str) -> str:
    """Return what a reward gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = reward(["?"], [completion], answer=[reference])[0]
    return "unreadable" if math.isnan(value) else f"{value:g}"


def code(text: str) -> str:
    """Return a text as code in a cell."""
    return f"`{text}`".replace("\n", "⏎").replace("|", r"\|")


def tables() -> str:
    """Return both tables."""
    number, mathematics, choice = NumberMatch(), MathMatch(), ChoiceMatch()
    rows = [
        (text, wanted, value_of(number, text, wanted), value_of(mathematics, text, wanted)) for text, wanted in ANSWERS
    ]
    answers = "".join(
        f"| {code(text)} | {code(wanted)} | {first} | {second} |\n" for text, wanted, first, second in rows
    )
    choices = "".join(
        f"| {code(text)} | {code(wanted)} | {value_of(choice, text, wanted)} |\n" for text, wanted in CHOICES
    )
    return f"{HEAD}{answers}\n{CHOICES_HEAD}{choices}"


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
