"""Mixtures: exact shares at every place, each data set shuffled by itself, and a column that names it."""

from collections import Counter
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl import PromptDataModule
from lightning_rl.data import PromptDataset
from lightning_rl.data.mixture import pick_source

MATH = [{"prompt": [2, 3], "n": n} for n in range(7)]
CODE = datasets.Dataset.from_list([{"prompt": [4], "n": n} for n in range(3)])


def mixture(**options: Any) -> PromptDataModule:
    data = PromptDataModule({"math": MATH, "code": CODE}, 3, **options)
    data.connect(None, None)
    return data


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(0, 99))
def test_a_source_has_its_share_of_the_places_to_within_two_everywhere(weights: list[int], places: int) -> None:
    picks = [pick_source(place, weights) for place in range(places)]
    counts = Counter(source for source, _ in picks)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - places * weight / sum(weights)) <= 1.5
        assert [number for one, number in picks if one == source] == list(range(counts[source]))


def test_every_rollout_has_its_shares_and_each_data_set_is_used_up_before_it_comes_again() -> None:
    prompts = mixture(weights={"code": 1, "math": 2.0}).at(range(21))
    sources = [prompt.columns["source"] for prompt in prompts]
    assert all(Counter(sources[start : start + 3]) == {"math": 2, "code": 1} for start in range(0, 21, 3))
    math = [prompt.columns["n"] for prompt in prompts if prompt.columns["source"] == "math"]
    code = [prompt.columns["n"] for prompt in prompts if prompt.columns["source"] == "code"]
    assert sorted(math[:7]) == sorted(math[7:]) == list(range(7)) and math[:7] != math[7:]
    assert sorted(code[:3]) == sorted(code[3:6]) == list(range(3))


def test_without_weights_each_pass_has_every_row_once() -> None:
    data = mixture()
    rows = [(prompt.columns["source"], prompt.columns["n"]) for prompt in data.at(range(20))]
    assert Counter(rows) == dict.fromkeys(rows, 2) and data.pass_length == 10
    assert Counter(source for source, _ in rows[:3]) == {"math": 2, "code": 1}


def test_the_order_depends_on_seed_and_place_alone() -> None:
    weights = {"math": 3, "code": 1}
    whole = mixture(weights=weights).take(40)
    later = mixture(weights=weights)
    later.load_state_dict({"cursor": 17})
    assert later.take(23) == whole[17:] and later.at([3, 30]) == [whole[3], whole[30]]
    assert mixture(weights=weights, seed=1).take(40) != whole
    rows = [prompt.columns["n"] for prompt in mixture(weights=weights, shuffle=False).take(4)]
    assert rows == [0, 1, 0, 2], "the first row of code is third"


def test_a_row_without_columns_is_the_prompt_and_validation_may_be_a_mixture() -> None:
    data = PromptDataModule({"a": [[2]], "b": [[3]]}, 2, validation={"c": [[4]], "d": [[5]]})
    data.connect(None, None)
    assert [(prompt.content, prompt.columns) for prompt in data.validation_prompts()] == [
        ([4], {"source": "c"}),
        ([5], {"source": "d"}),
    ]


def test_columns_may_use_the_source() -> None:
    assert PromptDataset({"a": [{"question": [2]}]}, columns={"prompt": "question", "environment": "source"}).prompt(
        0
    ).columns == {"environment": "a"}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ({"a": [[2]]}, {"weights": {"b": 1}}, 'expected a weight for each of "a", got weights of "b"'),
        ({"a": [[2]]}, {"weights": {"a": -1}}, "expected weight of a >= 0, got -1"),
        ({"a": [[2]]}, {"weights": {"a": 0}}, "expected a weight above 0"),
        ([[2]], {"weights": {"a": 1}}, "expected weights= with a mapping from names to data sets"),
        ({"a": [{"prompt": [2], "source": "x"}]}, {}, "without a column \"source\".* got 'x' in a, row 0: rename"),
        ({"a": CODE.to_iterable_dataset()}, {}, 'got an IterableDataset for "a": .*interleave_datasets'),
        ({"a": [], "b": [[2]]}, {}, 'got no rows for "a"'),
        ({"question": ["a"], "answer": ["b"]}, {}, r'got a mapping with "question", "answer": .*from_dict\(columns\)'),
        (
            {"a": [[2]], "b": [[2, 3, 4]]},
            {"weights": {"a": 1, "b": 1}, "max_prompt_tokens": 2, "too_long": "drop"},
            r"of each data set with a weight, got \[1, 0\] after 1 that are too long",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataModule(prompts, 1, **options).connect(None, 9)
