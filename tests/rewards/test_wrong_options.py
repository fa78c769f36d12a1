"""Wrong options: each reward of the library refuses them by name, and reads no list letter by letter."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightning_rl.rewards import (
    ChoiceMatch,
    CodeTests,
    ExactMatch,
    JSONSchema,
    Judge,
    Language,
    Length,
    MathMatch,
    NumberMatch,
    RegexMatch,
    Repetition,
    RewardModel,
    Rewards,
    SubprocessReward,
    TagFormat,
)


def rated(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(prompts)


Make = Callable[..., Any]

OPTIONS: list[tuple[Make, dict[str, Any], str]] = [
    (ExactMatch, {"answer": 3}, "expected answer to be a string of at least one letter, got 3"),
    (ExactMatch, {"after": ["</think>"]}, r"expected after to be a string of at least one letter or None, got \["),
    (
        ChoiceMatch,
        {"letters": ["A", "B"]},
        r"letters to be two or more different letters, such as 'ABCD', got \['A', 'B'\]",
    ),
    (
        ChoiceMatch,
        {"markers": "answer is"},
        r"markers to be a list of strings .* got 'answer is': write \['answer is'\]",
    ),
    (
        ChoiceMatch,
        {"choices": ["options"]},
        r"choices to be a string of at least one letter or None, got \['options'\]",
    ),
    (
        NumberMatch,
        {"markers": "answer is"},
        r"markers to be a list of strings .* got 'answer is': write \['answer is'\]",
    ),
    (NumberMatch, {"markers": ["####", ""]}, "expected markers to be a list of strings of at least one letter, got"),
    (MathMatch, {"timeout": "5"}, "expected timeout to be a number > 0, got str '5': remove the quotes"),
    (partial(Rewards, rated), {"workers": 4}, "expected workers to be RayWorkers or None, got 4"),
    (RegexMatch, {"pattern": None}, "expected pattern to be a regular expression, got None"),
    (JSONSchema, {"schema": 5}, "expected schema to be a JSON schema or the name of a column, got 5"),
    (TagFormat, {"tags": "think"}, r"expected tags to be a list of strings .* got 'think': write \['think'\]"),
    (TagFormat, {"prefix": None}, "expected prefix to be a string, got None"),
    (Language, {"language": 3}, "expected language to be a string of at least one letter or None, got 3"),
    (Language, {"language": "en", "among": "en"}, r"expected among to be a list of strings .* write \['en'\]"),
    (CodeTests, {"tests": 5}, "expected tests to be a string of at least one letter, got 5"),
    (CodeTests, {"sandbox": 5}, r"expected sandbox to be a Sandbox\(...\) or SandboxService\(...\), got 5"),
    (Judge, {"model": None}, "expected model to be a string of at least one letter, got None"),
    (Judge, {"model": "x", "temperature": -1}, "expected temperature >= 0, got -1"),
    (Judge, {"model": "x", "options": "a"}, "expected options to be a mapping, .* got 'a'"),
    (Judge, {"model": "x", "pattern": "("}, r"expected pattern to be a regular expression, got '\(': "),
    (Judge, {"model": "x", "scale": "1-5"}, "expected scale to be two different numbers, such as .* got '1-5'"),
    (SubprocessReward, {"reward": 5}, "expected reward to be a function, got 5: put a weight beside SubprocessReward"),
    (SubprocessReward, {"reward": rated, "environment": ["a"]}, r"environment to map names to strings, .* got \['a'\]"),
    (Length, {}, "expected min_length or max_length, or else target, got min_length=0"),
    (Length, {"target": 3, "max_length": 3}, "expected min_length or max_length, or else target"),
    (Length, {"min_length": 3, "max_length": 2}, "expected min_length <= max_length, got 3 and 2"),
    (Length, {"max_length": -1}, "expected max_length to be a whole number of at least 0 or None, got -1"),
    (Length, {"max_length": 1, "margin": -1}, "expected margin to be a whole number of at least 0, got -1"),
    (Length, {"target": -2}, "expected target to be a whole number of at least 0 or None, got -2"),
    (Length, {"max_length": 1, "unit": "words"}, "expected unit tokens or characters, got 'words'"),
    (RegexMatch, {"pattern": "("}, r"expected pattern to be a regular expression, got '\('"),
    (RegexMatch, {"pattern": "a", "answer": "answer"}, "expected pattern to have a group for the answer, got 'a'"),
    (Repetition, {"n": 0}, "expected n to be a whole number above 0, got 0"),
    (Repetition, {"unit": "letters"}, "expected unit tokens or words, got 'letters'"),
    (NumberMatch, {"rel_tol": -1.0}, "expected rel_tol >= 0, got -1.0"),
    (RewardModel, {"model": 3}, "expected model to be a name, a path or a callable that builds one, got 3"),
    (RewardModel, {"model": "somewhere", "tokens": "both"}, r"expected tokens own or policy, got 'both'"),
    (
        RewardModel,
        {"model": "somewhere", "max_tokens_per_microbatch": 0},
        "expected max_tokens_per_microbatch to be a whole number above 0, got 0",
    ),
    (Judge, {"model": "m", "base_url": "127.0.0.1:8000"}, "expected base_url to be a URL without a name or password"),
    (
        Judge,
        {"model": "m", "base_url": "http://me:hunter2@127.0.0.1/v1"},
        "expected base_url to be a URL without a name or password",
    ),
    (Judge, {"model": "m", "concurrency": 0}, "expected concurrency to be a whole number above 0, got 0"),
    (
        Judge,
        {"model": "m", "scale": (1, 1)},
        r"expected scale to be two different numbers, such as \(0, 10\), got \(1, 1\)",
    ),
    (Judge, {"model": "m", "pattern": "score"}, "expected pattern to have a group for the score, got 'score'"),
    (
        Judge,
        {"model": "m", "template": "{prompt}"},
        r"expected template to have the field \{completion\}.*got the fields \['prompt'\]",
    ),
    (
        Judge,
        {"model": "m", "template": "{completion} {x.y}"},
        r"with \{\{ and \}\} for braces, got the fields \['completion', 'x.y'\]",
    ),
    (Judge, {"model": "m", "template": "{completion} {"}, r"expected template with \{\{ and \}\} for braces, got"),
    (
        Judge,
        {"model": "m", "options": {"stream": True}},
        r"expected options other than .*\"stream\".*, got \['stream'\]",
    ),
    (SubprocessReward, {"reward": rated, "processes": 0}, "expected processes to be a whole number above 0, got 0"),
    (SubprocessReward, {"reward": rated, "seconds": float("nan")}, "expected seconds > 0, got nan"),
]


@pytest.mark.parametrize(("make", "options", "message"), OPTIONS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_option_is_named_with_what_it_may_be(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        make(**options)
    assert re.match("expected ", str(refused.value)) and "hunter2" not in str(refused.value)


def test_markers_may_be_a_list_and_mean_what_they_say() -> None:
    text = "the answer is 42 as 6 times 7"
    assert NumberMatch(markers=["answer is"])(["?"], [text], answer=["42"]) == [1.0]  # pyrefly: ignore[bad-argument-type]
    assert NumberMatch(markers=("answer is",))(["?"], [text], answer=["7"]) == [0.0]


@pytest.mark.parametrize(
    ("reward", "completions", "columns", "message"),
    [
        (ExactMatch(), ["4", "2"], {"answer": "42"}, "expected answer to be a list of 2 values, .* got '42'"),
        (ExactMatch(), ["4", "2"], {"answer": ["4"]}, "expected answer to hold 2 values, one for each row, got 1"),
        (ExactMatch(), "42", {"answer": ["4", "2"]}, "expected completions to be a list of 2 values, .* got '42'"),
        (RegexMatch(pattern="(.)", answer="answer"), ["4"], {"answer": "4"}, "expected answer to be a list"),
        (ChoiceMatch(choices="o"), ["A"], {"answer": ["A"], "o": "x"}, "expected o to be a list of 1 values"),
        (TagFormat(), "<a>", {}, "expected completions to be a list of 3 values"),
        (Repetition(unit="words"), "a a", {}, "expected completions to be a list of 3 values"),
    ],
)
def test_a_string_in_place_of_rows_is_refused(reward: Any, completions: Any, columns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward(["?"] * len(completions), completions, **columns)
