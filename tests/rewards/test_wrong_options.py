"""Wrong options: each reward of the library refuses them by name, and reads no list letter by letter."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    SubprocessReward,
    TagFormat,
)


def rated(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(prompts)


Make = Callable[..., Any]

OPTIONS: list[tuple[Make, dict[str, Any], str]] = [
    (ExactMatch, {"answer": 3}, "expected answer to be a string of at least one letter, got 3"),
    (ExactMatch, {"ignore_case": "no"}, "expected ignore_case to be True or False, got 'no'"),
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
    (NumberMatch, {"strict": "no"}, "expected strict to be True or False, got 'no'"),
    (NumberMatch, {"rel_tol": "1%"}, "expected rel_tol >= 0, got '1%'"),
    (MathMatch, {"timeout": "5"}, "expected timeout > 0, got '5'"),
    (MathMatch, {"processes": 1.5}, "expected processes to be a whole number above 0, got 1.5"),
    (MathMatch, {"marker": None}, "expected marker to be a string of at least one letter, got None"),
    (RegexMatch, {"pattern": None}, "expected pattern to be a regular expression, got None"),
    (RegexMatch, {"pattern": "a", "timeout": None}, "expected timeout > 0, got None"),
    (RegexMatch, {"pattern": "a", "last": "yes"}, "expected last to be True or False, got 'yes'"),
    (JSONSchema, {"schema": 5}, "expected schema to be a JSON schema or the name of a column, got 5"),
    (JSONSchema, {"schema": ""}, "expected schema to be a string of at least one letter, got ''"),
    (JSONSchema, {"schema": {}, "fenced": "no"}, "expected fenced to be True or False, got 'no'"),
    (TagFormat, {"tags": "think"}, r"expected tags to be a list of strings .* got 'think': write \['think'\]"),
    (TagFormat, {"prefix": None}, "expected prefix to be a string, got None"),
    (TagFormat, {"partial": "no"}, "expected partial to be True or False, got 'no'"),
    (Length, {"max_length": 2.5}, "expected max_length to be a whole number of at least 0 or None, got 2.5"),
    (Length, {"target": 2.5}, "expected target to be a whole number of at least 0 or None, got 2.5"),
    (Repetition, {"n": 2.0}, "expected n to be a whole number above 0, got 2.0"),
    (Language, {"language": 3}, "expected language to be a string of at least one letter or None, got 3"),
    (Language, {"column": 3}, "expected column to be a string of at least one letter or None, got 3"),
    (Language, {"language": "en", "among": "en"}, r"expected among to be a list of strings .* write \['en'\]"),
    (CodeTests, {"tests": 5}, "expected tests to be a string of at least one letter, got 5"),
    (CodeTests, {"sandbox": 5}, r"expected sandbox to be a Sandbox\(...\) or SandboxService\(...\), got 5"),
    (Judge, {"model": None}, "expected model to be a string of at least one letter, got None"),
    (Judge, {"model": "x", "temperature": -1}, "expected temperature >= 0, got -1"),
    (Judge, {"model": "x", "options": "a"}, "expected options to be a mapping, .* got 'a'"),
    (Judge, {"model": "x", "pattern": "("}, r"expected pattern to be a regular expression, got '\(': "),
    (Judge, {"model": "x", "scale": "1-5"}, "expected scale to be two different numbers, such as .* got '1-5'"),
    (Judge, {"model": "x", "timeout": "9"}, "expected timeout > 0, got '9'"),
    (
        RewardModel,
        {"model": "m", "device": "gpu"},
        'expected device to be a device such as "cuda:1" or "cpu", .* got \'gpu\'',
    ),
    (
        RewardModel,
        {"model": "m", "dtype": "bf16"},
        "expected dtype to be a dtype such as torch.bfloat16, .* got 'bf16'",
    ),
    (RewardModel, {"model": "m", "dtype": torch.int8}, "expected dtype to be a dtype such as torch.bfloat16"),
    (RewardModel, {"model": "m", "label": "good"}, "expected label to be the index of a label or None, got 'good'"),
    (SubprocessReward, {"reward": 5}, "expected reward to be a function, got 5: put a weight beside SubprocessReward"),
    (SubprocessReward, {"reward": rated, "environment": ["a"]}, r"environment to map names to strings, .* got \['a'\]"),
    (
        SubprocessReward,
        {"reward": rated, "environment": {"A": 1}},
        r"environment to map names to strings, .* got \{'A': 1\}",
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), OPTIONS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_option_is_named_with_what_it_may_be(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        make(**options)
    assert re.match("expected ", str(refused.value))


def test_markers_may_be_a_list_and_mean_what_they_say() -> None:
    text = "the answer is 42 as 6 times 7"
    assert NumberMatch(markers=["answer is"])(["?"], [text], answer=["42"]) == [1.0]  # pyright: ignore[reportArgumentType]
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
