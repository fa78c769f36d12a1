"""VerlReward: verl's functions and columns."""

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
