"""Checks of arguments: what is allowed, and what the message says of the rest."""

import math
import re
from typing import Any

import pytest

from lightning_rl.utils.arguments import check_bools, check_choices, check_counts, check_numbers


@pytest.mark.parametrize(
    ("bounds", "value", "message"),
    [
        ({"above": 0}, 0, "expected beta > 0, got 0"),
        ({"above": 0}, math.nan, "expected beta > 0, got nan"),
        ({"above": 0}, True, "expected beta to be a number > 0, got True"),
        ({"at_least": 0}, -1e-9, "expected beta >= 0, got -1e-09"),
        ({"at_least": 0}, "0.1", "expected beta to be a number >= 0, got str '0.1': remove the quotes"),
        ({"at_least": 0}, None, "expected beta to be a number >= 0, got None"),
        ({"at_least": 0, "at_most": 1}, 1.5, "expected beta in [0, 1], got 1.5"),
        ({"above": 0, "at_most": 1}, 0, "expected beta in (0, 1], got 0"),
        ({"at_most": 1}, 2, "expected beta <= 1, got 2"),
        ({"above": 1, "optional": True}, 1, "expected beta > 1 or None, got 1"),
        ({"at_least": 0, "finite": True}, math.inf, "expected beta >= 0 and finite, got inf"),
        ({}, [1.0], "expected beta to be a number, got list [1.0]"),
        ({"at_most": 1, "optional": True}, "low", "expected beta to be a number <= 1 or None, got str 'low'"),
        ({}, math.nan, "expected beta to be a number, got nan"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name(bounds: dict[str, Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_numbers(alpha=0.5 if bounds.get("above") != 1 else 2, beta=value, **bounds)


def test_numbers_within_bounds_pass() -> None:
    check_numbers(above=0, a=1e-9, b=1, c=math.inf)
    check_numbers(at_least=0, at_most=1, a=0, b=1, c=0.5)
    check_numbers(above=0, finite=True, optional=True, a=None, b=3.0)


@pytest.mark.parametrize(
    ("number", "got"),
    [(-1, "-1"), (0.5, "0.5"), (True, "True"), ("1", "str '1': remove the quotes"), ("a", "str 'a'"), (None, "None")],
)
def test_what_is_no_whole_number_is_refused(number: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"^expected size to be a whole number of at least 0, got {got}$"):
        check_counts(0, size=number)
    check_counts(0, size=0)


def test_whole_numbers_below_the_least_are_refused() -> None:
    with pytest.raises(ValueError, match="expected size to be a whole number above 0 or None, got 0"):
        check_counts(1, optional=True, size=0)
    check_counts(1, optional=True, size=None)


def test_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ValueError, match="expected packing to be True or False, got 'no'"):
        check_bools(packing="no")
    check_bools(packing=False)


@pytest.mark.parametrize("choice", ["new", None, ["old"]])
def test_an_unknown_choice_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected against old or rollout, got {choice!r}")):
        check_choices(("old", "rollout"), against=choice)
    check_choices(("old", "rollout"), against="old")
