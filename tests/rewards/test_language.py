"""Language: shares of letters by line, with code and formulas left out."""

import time
from typing import Any

import pytest

from lightning_rl.rewards import Language

ENGLISH = "We add the two numbers and get the result."
GERMAN = "Wir addieren die beiden Zahlen und erhalten das Ergebnis."
CHINESE = "\u6211\u4eec\u628a\u8fd9\u4e24\u4e2a\u6570\u5b57\u76f8\u52a0\u5f97\u5230\u4e00\u4e2a\u7ed3\u679c"
LETTERS = [sum(letter.isalpha() for letter in text) for text in (ENGLISH, GERMAN)]


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        pytest.param({}, ENGLISH, 1.0, id="right"),
        pytest.param({}, GERMAN, 0.0, id="wrong"),
        pytest.param({}, CHINESE, 0.0, id="other-script"),
        pytest.param({"language": "zh"}, CHINESE, 1.0, id="other-script-wanted"),
        pytest.param({}, f"{ENGLISH}\n{GERMAN}", LETTERS[0] / sum(LETTERS), id="mixed"),
        pytest.param(
            {"among": ("en", "de")}, f"<think>{ENGLISH}</think>\nok\n", 1.0, id="short-line-goes-with-the-text"
        ),
        pytest.param({}, "", None, id="empty"),
        pytest.param({}, "42", None, id="no-letters"),
        pytest.param({}, "\0" * 100, None, id="nul"),
        pytest.param({}, f"```python\n{GERMAN}\n```", None, id="code-alone"),
        pytest.param(
            {}, f"${GERMAN}$ `{GERMAN}` \\({GERMAN}\\) \\[{GERMAN}\\] $${GERMAN}$$ {ENGLISH}", 1.0, id="formulas"
        ),
    ],
)
def test_table(options: dict[str, Any], completion: str, value: float | None) -> None:
    (found,) = Language(**dict[str, Any](language="en") | options)(["?"], [completion])
    assert found == (None if value is None else pytest.approx(value))


def test_a_language_for_each_row() -> None:
    reward = Language(column="lang", among=("en", "de"))
    assert reward(["?"] * 3, [ENGLISH] * 3, lang=["en", "de", None]) == [1.0, 0.0, None]


@pytest.mark.parametrize("piece", ["\\(", "\\[", "$", "$$", "`", "```", "<", "<a", "\\"])
def test_time_grows_with_the_text_and_not_with_its_square(piece: str) -> None:
    begin = time.process_time()
    (value,) = Language(language="en")(["?"], [(piece * 10**6)[: 10**6] + "\n" + ENGLISH])
    assert value is None or 0 <= value <= 1
    assert time.process_time() - begin < 20  # about one second; a square would take hours
