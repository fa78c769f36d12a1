"""TagFormat by hand."""

from typing import Any

import pytest

from lightning_rl.rewards import TagFormat

GOOD = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        ({}, GOOD, 1.0),
        ({}, f" {GOOD}\n", 1.0),
        ({}, "", 0.0),
        ({}, f"Well, {GOOD}", 0.0),
        ({}, f"{GOOD} bye", 0.0),
        ({}, "<think>a</think> so <answer>b</answer>", 0.0),
        ({}, "<answer>b</answer><think>a</think>", 0.0),
        ({}, "<think>a<answer>b</answer></think>", 0.0),
        ({}, "<think> </think><answer>b</answer>", 0.0),
        ({}, f"{GOOD}{GOOD}", 0.0),
        ({}, "<think>a</think>", 0.0),
        ({}, "<think>a\0</think><answer>\u00e9\n\n</answer>", 1.0),
        ({}, "<think>" * 10**5, 0.0),
        ({"prefix": "<think>\n"}, "a</think><answer>b</answer>", 1.0),
        ({"prefix": "<think>\n"}, GOOD, 0.0),
        ({"partial": True}, "<think>a</think>", 0.5),
        ({"partial": True}, "<think><think>a</think>", 0.25),
        ({"partial": True}, "", 0.0),
        ({"partial": True}, GOOD, 1.0),
        ({"tags": ["a"]}, "<a>x</a>", 1.0),
    ],
)
def test_table(options: dict[str, Any], completion: str, value: float) -> None:
    assert TagFormat(**options)(["?"], [completion]) == [value]


@pytest.mark.parametrize("tags", [(), ("a", "a"), ("<a>",)])
def test_tags_are_different_names(tags: Any) -> None:
    with pytest.raises(ValueError, match=r"expected tags to be different names, such as \('think', 'answer'\), got"):
        TagFormat(tags=tags)
