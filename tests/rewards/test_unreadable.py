"""Unreadable rows: one bad value of a column costs its own row, with a warning, and is never a silent 0."""

import math
from typing import Any

import pytest
from kit.scores import scores_of

from lightning_rl.rewards import (
    ChoiceMatch,
    ExactMatch,
    JSONSchema,
    Language,
    Length,
    MathMatch,
    NumberMatch,
    RegexMatch,
    Rewards,
)

ENGLISH = "We add the two numbers now."


@pytest.mark.parametrize(
    ("reward", "completion", "column", "good", "bad", "message"),
    [
        (NumberMatch(), "4", "answer", "4", "x + 1", "expected a number, or a text with one number, got 'x"),
        (MathMatch(), "4", "answer", "4", "", "expected a number or formula, got ''"),
        (MathMatch(), "4", "answer", "4", {"a": 4}, "expected a number or formula, got {'a': 4}"),
        (ExactMatch(), "4", "answer", "4", 4, "expected a string or a list of strings, got 4"),
        (ChoiceMatch(), "A", "answer", "A", "Z", "expected one of the letters"),
        (RegexMatch(pattern="(.)", answer="answer"), "4", "answer", 4, ["4"], r"a string or a number, got \['4'\]"),
        (JSONSchema(schema="s"), "{}", "s", {"type": "object"}, "not json", "a JSON schema, got 'not json'"),
        (JSONSchema(schema="s"), "{}", "s", '{"type": "object"}', {"type": "blob"}, "a JSON schema, got .*blob"),
        (JSONSchema(schema="s"), "{}", "s", {}, 5, "expected a JSON schema, got 5"),
        (JSONSchema(schema="s"), '"a"', "s", {}, {"pattern": "("}, "is not a 'regex'"),
        (JSONSchema(schema="s"), "{}", "s", {}, {"$ref": "#/nowhere"}, "valid patterns and existing references"),
        (Length(target="w"), "4", "w", 1, "long", "expected a length, .* got 'long'"),
        (Length(target="w"), "4", "w", 1, -3, "expected a length, .* got -3"),
        (Length(target="w"), "4", "w", 1, 1.5, "expected a length, .* got 1.5"),
        (Language(column="l"), ENGLISH, "l", "en", "xx", "expected a language code in .* got 'xx'"),
        (Language(column="l"), ENGLISH, "l", "en", ["en"], r"a language code in .* got \['en'\]"),
        (Language(column="l", among=("en", "de")), ENGLISH, "l", "en", "fr", r"in \['de', 'en'\], got 'fr'"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "__dataclass_fields__") else None,
)
def test_a_bad_row_fails_alone(reward: Any, completion: str, column: str, good: Any, bad: Any, message: str) -> None:
    columns = {column: [good, bad, good, None]}
    rewards = Rewards({"read": reward, "applies": lambda prompts, **_: [1.0] * len(prompts)})
    with pytest.warns(UserWarning, match=rf"{type(reward).__name__} cannot read 1 of its references.*{message}"):
        found = scores_of(rewards, ["?"] * 4, [completion] * 4, completion_ids=[[1]] * 4, columns=columns)
    values = found.calls[0].values
    assert values[0] == values[2] == 1.0 and values[3] is None
    assert math.isnan(values[1] or 0.0) and found.failed.tolist() == [False, True, False, False]


def test_choices_that_are_one_text_cost_their_row() -> None:
    with pytest.warns(UserWarning, match="expected a list of choice texts, got 'ab'"):
        values = ChoiceMatch(choices="o")(["?"] * 2, ["A"] * 2, answer=["A", "A"], o=[["x", "y"], "ab"])
    assert values[0] == 1.0 and math.isnan(values[1] or 0.0)
