"""VerlReward: verl's functions and columns."""

import math
from typing import Any

import pytest

from lightning_rl.rewards import Rewards, VerlReward


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    right = float(solution_str == ground_truth)
    return {"score": right, "index": extra_info["index"]} if data_source == "numbers" else right


def test_columns_of_verl_reach_the_function_and_further_entries_are_logged() -> None:
    logged: dict[str, Any] = {}
    values = VerlReward(compute_score=compute_score)(
        ["?"] * 3,
        ["4", "5", [{"role": "assistant", "content": "6"}]],
        data_source=["numbers", "words", "words"],
        reward_model=[{"style": "rule", "ground_truth": truth} for truth in ("4", "4", "6")],
        extra_info=[{"index": 7}, None, None],
        log_extra=logged.__setitem__,
    )
    assert values == [1.0, 0.0, 1.0] and logged == {"index": [7, None, None]}
    assert VerlReward(compute_score=compute_score)(["?"], ["4"], ground_truth=["4"]) == [1.0]


def test_data_without_a_ground_truth_and_a_function_that_is_not_wrapped_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"'reward_model' with 'ground_truth'.*got \['answer'\]"):
        VerlReward(compute_score=compute_score)(["?"], ["4"], answer=["4"])
    with pytest.raises(TypeError, match=r"VerlReward\(compute_score=compute_score\)"):
        Rewards(compute_score)(["?"], ["4"], completion_ids=[[4]], columns={"answer": ["4"]})


def test_a_row_that_fails_costs_no_other_and_a_row_without_a_truth_gets_none() -> None:
    def divide(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        if ground_truth in ("word", "none"):
            return {"score": None if ground_truth == "none" else ground_truth, "seen": solution_str}
        return 1 / (int(ground_truth) - 5)

    logged: dict[str, Any] = {}
    models = [{"ground_truth": "5"}, None, {"ground_truth": None}, {"style": "rule"}, "x", {"ground_truth": "word"}]
    models.append({"ground_truth": "none"})
    with pytest.warns(
        UserWarning, match=r"divide failed on 5 of 8 completions.* ZeroDivisionError\('division by zero'\)"
    ):
        values = VerlReward(compute_score=divide)(
            ["?"] * 8, ["4"] * 8, reward_model=[*models, {"ground_truth": "6"}], log_extra=logged.__setitem__
        )
    assert values[1:3] == [None, None] and values[7] == 1.0
    assert [row for row, value in enumerate(values) if value is not None and math.isnan(value)] == [0, 3, 4, 5, 6]
    reasons = logged["reason"]
    assert [reason is None for reason in reasons] == [row not in (0, 3, 4, 5, 6) for row in range(8)]
    assert "expected a mapping with 'ground_truth', got {'style': 'rule'}" in reasons[3] and "'word'" in reasons[5]


def test_an_exit_is_no_failure_of_a_row() -> None:
    def stop(**_: Any) -> float:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        VerlReward(compute_score=stop)(["?"], ["4"], ground_truth=["4"])
