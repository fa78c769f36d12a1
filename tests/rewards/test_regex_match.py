"""RegexMatch: found or not, captured or not, and never for longer than its time."""

import time

import pytest

from lightning_rl.rewards import RegexMatch, regex_match


@pytest.mark.parametrize(
    ("pattern", "completion", "value"),
    [
        (r"\d+", "it is 42", 1.0),
        (r"\d+", "", 0.0),
        (r"^\d+$", "it is 42", 0.0),
        (r"(?i)YES", "yes", 1.0),
        (r"a\x00b", "a\0b", 1.0),
        (r"", "", 1.0),
    ],
)
def test_a_pattern_alone(pattern: str, completion: str, value: float) -> None:
    assert RegexMatch(pattern=pattern)(["?"], [completion]) == [value]


@pytest.mark.parametrize(
    ("completion", "value"),
    [("<a> 4 </a>", 1.0), ("<a>5</a>", 0.0), ("4", 0.0), ("<a>5</a><a>4</a>", 1.0), ("<a>4</a><a>5</a>", 0.0)],
)
def test_what_a_group_captures_has_to_be_the_reference(completion: str, value: float) -> None:
    reward = RegexMatch(pattern=r"<a>(.*?)</a>", answer="answer")
    assert reward(["?"] * 2, [completion] * 2, answer=["4", 4]) == [value, value]


def test_an_optional_group_and_no_reference() -> None:
    reward = RegexMatch(pattern=r"x(\d)?", answer="gold")
    assert reward(["?"] * 3, ["x4", "x", "x4"], gold=["4", "4", None]) == [1.0, 0.0, None]


def test_a_search_that_never_ends_scores_0_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex_match, "TIMEOUT", 0.2)
    endless = ",".join("1" * 60)
    begin = time.process_time()
    assert RegexMatch(pattern=r"(.*?,){12}P")(["?"] * 2, [endless, "," * 12 + "P"]) == [0.0, 1.0]
    assert 0.1 < time.process_time() - begin < 5
