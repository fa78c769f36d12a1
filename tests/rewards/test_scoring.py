"""Rewards: names, weights, and rows that a function cannot score, which are left out and never scored 0."""

import asyncio
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kit.scores import Scores, scores_of
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rl.rewards import ExactMatch, Failure, Reward, Rewards

Values = Sequence[float | None]


def says(*values: float | None, name: str = "said") -> Reward:
    """Return a reward that looks up the value of each row by its number, the prompt."""

    def said(prompts: Sequence[int], completions: Sequence[str], **_: Any) -> Values:
        return [values[row] for row in prompts]

    said.__name__ = name
    return said


def fails_for(*bad: int, name: str = "fragile") -> tuple[Reward, list[list[int]]]:
    """A function that raises if one of its rows is bad, and the rows of each of its calls."""
    calls: list[list[int]] = []

    def fragile(prompts: Sequence[int], completions: Sequence[str], **_: Any) -> Values:
        calls.append(list(prompts))
        if set(bad) & set(prompts):
            raise KeyError("no answer")
        return [1.0] * len(prompts)

    fragile.__name__ = name
    return fragile, calls


def scores(rewards: Any, rows: int, **options: Any) -> Scores:
    """Scores rows whose prompts are their numbers; a warning is an error unless the test expects it."""
    completions = [f"said {row}" for row in range(rows)]
    ids = [[row] for row in range(rows)]
    known: dict[str, Any] = {"completion_ids": ids, "columns": {}, **options}
    return scores_of(rewards, list(range(rows)), completions, **known)


def test_values_are_weighted_and_summed_and_kept_raw() -> None:
    found = scores({"a": (says(1.0, 2.0), 2.0), "b": (says(0.5, -1.0), 10)}, 2)
    assert found.total.tolist() == [7.0, -6.0] and found.scored.tolist() == [True, True]
    assert {name: raw.tolist() for name, raw in found.raw.items()} == {"a": [1.0, 2.0], "b": [0.5, -1.0]}


def test_none_is_left_out_of_the_sum_and_takes_no_row_out() -> None:
    found = scores([says(1.0, None, name="a"), says(None, 3.0, name="b")], 2)
    assert found.total.tolist() == [1.0, 3.0] and found.scored.tolist() == [True, True]
    assert found.raw["a"][1].isnan() and found.raw["b"][0].isnan()


def test_a_row_that_no_function_applies_to_is_not_scored() -> None:
    with pytest.warns(UserWarning, match=r"no reward function applies to completion 'said 1' of prompt 1: the row"):
        found = scores([says(1.0, None, name="a"), says(1.0, None, name="b")], 2)
    assert found.scored.tolist() == [True, False] and found.total.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_takes_its_row_out(value: float) -> None:
    found = scores([says(0.5, value, 2.0), says(1.0, 1.0, 1.0, name="other")], 3)
    assert found.scored.tolist() == [True, False, True] and found.total.tolist() == [1.5, 0.0, 3.0]
    assert found.raw["said"].isnan().tolist() == [False, True, False] and found.raw["other"].tolist() == [1.0] * 3
    assert found.failed.tolist() == [False, True, False]
    assert (
        found.calls[0].failures == [Failure((1,), f"returned {value}", kind="invalid")] and not found.calls[1].failures
    )


@pytest.mark.parametrize(("value", "weight"), [(1e39, 1.0), (3e38, 10.0)])
def test_a_total_too_large_for_its_dtype_takes_its_row_out(value: float, weight: float) -> None:
    found = scores({"said": (says(0.5, value), weight), "other": says(1.0, 1.0)}, 2)
    assert found.scored.tolist() == [True, False] and found.failed.tolist() == [False, True]
    assert found.total.tolist() == [0.5 * weight + 1.0, 0.0]
    failure = Failure((1,), "makes a total reward too large for torch.float32", kind="invalid")
    assert found.calls[0].failures == [failure] and not found.calls[1].failures
    assert scores({"said": (says(0.5, value), weight)}, 2, dtype=torch.float64).scored.all()


def test_an_exception_takes_out_its_whole_batch_and_nothing_is_called_again() -> None:
    fragile, calls = fails_for(1, 3)
    found = scores({"fragile": fragile, "logged": (says(*[2.0] * 4), 0.0)}, 4)
    assert not found.scored.any() and found.failed.all() and found.total.tolist() == [0.0] * 4
    assert calls == [[0, 1, 2, 3]], "never row by row"
    (failure,) = found.calls[0].failures
    assert failure.rows == (0, 1, 2, 3) and failure.cause == "raised KeyError('no answer')"
    assert 'raise KeyError("no answer")' in failure.traceback, "the line that raised"
    assert found.raw["logged"].tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        pytest.param(None, "None", id="none"),
        pytest.param(0.5, "float 0.5", id="scalar"),
        pytest.param({"a": 1.0, "b": 2.0}, "dict {'a': 1.0, 'b': 2.0}", id="dict"),
        pytest.param("10", "str '10'", id="string"),
        pytest.param({0.0, 1.0}, "set {0.0, 1.0}", id="set"),
        pytest.param(["1.0", "0.0"], "str '1.0' for row 0", id="strings"),
        pytest.param([1.0, [0.0]], r"list [0.0] for row 1", id="nested"),
        pytest.param([1.0, 1j], "complex 1j for row 1", id="complex"),
        pytest.param([1.0], "1 in list", id="short"),
        pytest.param(torch.zeros(3), "3 in Tensor", id="long-tensor"),
        pytest.param(torch.zeros(2, 1), "Tensor of shape [2, 1]", id="matrix"),
        pytest.param(torch.tensor(1.0), "Tensor of shape []", id="scalar-tensor"),
        pytest.param(np.zeros((1, 2)), "ndarray of shape [1, 2]", id="array"),
        pytest.param(itertools.repeat(1.0), "more than 2 in repeat", id="endless"),
        pytest.param(iter([1.0]), "1 in list_iterator", id="short-iterator"),
    ],
)
def test_rubbish_fails_every_row_of_its_call_and_says_what_came(returned: Any, got: str) -> None:
    found = scores({"odd": lambda *_, **__: returned, "other": says(1.0, 1.0)}, 2)
    (failure,) = found.calls[0].failures
    expected = "returned invalid rewards: expected 2 numbers or None, one for each completion, got "
    assert failure.cause == expected + got and failure.rows == (0, 1)
    assert not found.scored.any() and found.raw["other"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("failure", [None, math.nan, 5.0])
def test_a_weight_of_zero_only_logs(failure: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = scores({"a": says(1.0, 2.0), "logged": (says(3.0, failure), 0.0)}, 2)
    assert found.total.tolist() == [1.0, 2.0] and found.scored.tolist() == [True, True]
    assert found.raw["logged"][0] == 3.0


def test_a_total_that_float32_cannot_hold_takes_its_row_out() -> None:
    found = scores([says(1e39, 1.0)], 2)
    assert found.scored.tolist() == [False, True] and found.total.tolist() == [0.0, 1.0]


def test_columns_and_ids_are_passed_by_row() -> None:
    seen: list[tuple[Any, ...]] = []

    def reading(
        prompts: Sequence[int], completions: Sequence[str], *, completion_ids: Any, answer: Any, level: Any
    ) -> Values:
        seen.append((list(prompts), list(completions), list(completion_ids), list(answer), list(level)))
        return [float(text) for text in answer]

    found = scores([reading], 2, columns={"answer": ["4", "5"], "level": [None, "x"]})
    assert found.total.tolist() == [4.0, 5.0]
    assert seen == [([0, 1], ["said 0", "said 1"], [[0], [1]], ["4", "5"], [None, "x"])]


def test_no_function_can_edit_what_the_next_one_is_given() -> None:
    def editing(prompts: Any, completions: Any, *, completion_ids: Any, answer: Any) -> Values:
        prompts[0][0]["content"] = "another question"
        answer[1]["steps"].append("a fourth")
        completion_ids[0][0] = 7
        completions.clear()
        return [0.0, 0.0]

    def reading(prompts: Any, completions: Any, *, completion_ids: Any, answer: Any) -> Values:
        return [float(len(prompts[0][0]["content"])), float(len(answer[1]["steps"])) + completion_ids[0][0]]

    question = [[{"role": "user", "content": "2 + 2?"}]] * 2
    rewards = Rewards([editing, reading])
    found = scores_of(
        rewards, question, ["4", "4"], completion_ids=[[1], [1]], columns={"answer": [{}, {"steps": ["a", "b", "c"]}]}
    )
    assert found.total.tolist() == [6.0, 4.0]
    assert question[0][0]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda: torch.tensor([1.0, 0.0]), id="tensor"),
        pytest.param(lambda: (True, False), id="booleans"),
        pytest.param(lambda: iter([1, 0]), id="iterator"),
    ],
)
def test_values_may_be_any_sequence_of_numbers(values: Callable[[], Any]) -> None:
    assert scores([lambda *_, **__: values()], 2).total.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_in_float64_and_summed_in_it(dtype: torch.dtype) -> None:
    found = scores([says(1e8, name="a"), says(1.0, name="b"), says(-1e8, name="c")], 1, dtype=dtype)
    assert found.total.dtype == found.raw["a"].dtype == torch.float64 and found.total.tolist() == [1.0]


class Correct:
    """A reward as an object."""

    def __call__(self, prompts: Sequence[int], completions: Sequence[str], **_: Any) -> Values:
        """Gives 1 to all."""
        return [1.0 for _ in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        pytest.param([says(1.0)], ["said"], id="function"),
        pytest.param([Correct()], ["Correct"], id="object"),
        pytest.param({"b": says(1.0), "a": says(1.0)}, ["b", "a"], id="mapping"),
    ],
)
def test_names_come_from_the_functions_or_the_mapping(
    functions: Sequence[Reward] | Mapping[str, Reward], names: list[str]
) -> None:
    assert list(scores(functions, 1).raw) == names


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        pytest.param([], r"expected at least one reward function, got \[\]", id="none"),
        pytest.param({}, r"expected at least one reward function, got \{\}", id="none-named"),
        pytest.param(
            [says(), says()], r"names, got \['said', 'said'\]: pass a mapping \{name: function\}", id="same-name"
        ),
        pytest.param(
            [partial(says), partial(says)], r"names, got \['partial', 'partial'\]: pass a mapping", id="partials"
        ),
        pytest.param([(says(), 0.5)], r"write \{'said': \(said, 0.5\)\}", id="pairs"),
        pytest.param(
            [says(), (says(name="b"), 1)], r"write \{'said': \(said, 1.0\), 'b': \(b, 1\)\}", id="mixed-pairs"
        ),
        pytest.param([(ExactMatch(), 0.5)], r"write \{'ExactMatch': \(ExactMatch\(...\), 0.5\)\}", id="objects"),
        pytest.param([("a", says(), 0.5)], r"got \('a', .* write \{'name': \(function, 0.5\)\}", id="named-pairs"),
        pytest.param(
            [(says(), 0.5), (says(), 1.0)],
            r"write \{'said_0': \(said, 0.5\), 'said_1': \(said, 1.0\)\}",
            id="same name",
        ),
        pytest.param((says(), 0.5), r"list of functions, got 0.5: write \{'said': \(said, 0.5\)\}", id="pair"),
        pytest.param({"": says()}, r"to be strings of at least one letter, got \[''\]", id="empty-name"),
        pytest.param({1: says()}, r"to be strings of at least one letter, got \[1\]", id="number-name"),
        pytest.param({"x": says(), "x/failed": says()}, 'got "x/failed" beside "x", which a logger', id="figure"),
        pytest.param({"task/std": says()}, 'got "task/std" beside "task"', id="figure-of-the-sum"),
        pytest.param({"greedy": says()}, r'which are reserved for the sum, got "greedy"', id="greedy"),
        pytest.param({"task": says()}, "expected names of rewards other than", id="reserved"),
        pytest.param({"a": (says(),)}, r"expected a function or \(function, finite weight\) for reward a", id="alone"),
        pytest.param({"a": (2.0, says())}, "expected a function or", id="swapped"),
        pytest.param(
            {"a": (says(), math.inf)},
            "expected the weight of reward a to be a number and finite, got inf",
            id="infinite",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_at_construction(rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards(rewards)


def test_weights_stand_beside_the_functions_of_a_mapping() -> None:
    rewards = {"b": (says(1.0), 3.0), "a": (says(1.0), 5), "c": says(1.0)}
    assert scores(rewards, 1).total.tolist() == [9.0]
    assert Rewards(rewards).weights == {"b": 3.0, "a": 5.0, "c": 1.0}


def test_every_call_is_kept_with_what_it_was_given() -> None:
    working = says(5.0, 1.0, name="working")
    (call,) = scores([working], 2, columns={"answer": ["4", "5"]}).calls
    assert (call.name, list(call.prompts), list(call.values)) == ("working", [0, 1], [5.0, 1.0])
    assert call.function is working and call.seconds >= 0 and call.columns == {"answer": ["4", "5"]}
    assert (list(call.completions), list(call.completion_ids)) == (["said 0", "said 1"], [[0], [1]])


def test_rewards_that_all_only_log_are_no_rewards_to_train_with() -> None:
    with pytest.raises(ValueError, match=r"expected a reward with a non-zero weight to train with, got \{'a': 0.0"):
        Rewards({"a": (says(), 0.0)}).check_weights()
    Rewards({"a": (says(), 0.0), "b": says()}).check_weights()


def leave(*_: Any, **__: Any) -> Any:
    exec("exit(0)")


async def leave_later(*_: Any, **__: Any) -> Any:
    raise SystemExit(0)


def close(*_: Any, **__: Any) -> Any:
    raise GeneratorExit


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (leave, r"raised SystemExit\(0\)"),
        (leave_later, r"raised .*SystemExit\(0\)"),
        (close, r"raised GeneratorExit\(\)"),
    ],
)
def test_a_reward_that_calls_exit_fails_its_rows_and_ends_nothing(reward: Any, cause: str) -> None:
    found = scores({"leaves": reward, "fine": says(1.0)}, 1)
    assert found.failed.tolist() == [True] and found.raw["fine"].tolist() == [1.0]
    assert re.match(cause, found.calls[0].failures[0].cause)
    assert scores(says(1.0), 1).total.tolist() == [1.0], "coroutines or not, the next call is as ever"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SIGTERMException])
def test_a_signal_that_is_raised_within_a_call_ends_it(interrupt: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise interrupt

    with pytest.raises(interrupt):
        scores(interrupted, 1)


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_later_calls_are_not_affected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_rl.utils.event_loop.BLOCKED_SECONDS", 0.2)
    released = threading.Event()

    async def blocks(*_: Any, **__: Any) -> list[float]:
        released.wait()
        return [1.0]

    async def fine(*_: Any, **__: Any) -> list[float]:
        await asyncio.sleep(0.0)
        return [2.0]

    found = scores(Rewards({"blocks": blocks, "fine": fine}, timeout=0.5), 1)
    assert found.failed.tolist() == [True]
    for call in found.calls:
        assert "0.5 s, because a coroutine blocks the event loop of rewards" in call.failures[0].cause
        assert "released.wait()" in call.failures[0].traceback
    assert scores(Rewards(fine, timeout=1e300), 1).total.tolist() == [2.0], "in a new event loop"
    released.set()


async def stop_the_loop(*_: Any, **__: Any) -> Any:
    asyncio.get_running_loop().stop()
    return [1.0]


def test_a_coroutine_that_stops_the_event_loop_ends_nothing() -> None:
    assert scores(stop_the_loop, 1).total.tolist() == [1.0]
    assert scores(stop_the_loop, 1).total.tolist() == [1.0]


def test_no_function_is_called_without_rows_whose_columns_are_unknown_then() -> None:
    def right(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> Values:
        raise AssertionError("called")

    scores = scores_of(right, [], [], completion_ids=[], columns={})
    assert [len(scores.total), len(scores.raw["right"]), len(scores.scored), len(scores.calls)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_device("meta"),
        lambda: torch.use_deterministic_algorithms(mode=True), lambda: torch.set_autocast_enabled("cpu", bool(1)),
        lambda: torch.set_grad_enabled(False),
    ],
    ids=["dtype", "device", "deterministic", "autocast", "grad"],
)  # fmt: skip
def test_the_state_of_torch_that_a_reward_leaves_changed_is_restored(change: Callable[[], Any]) -> None:
    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        del completions, columns
        change()
        return [1.0] * len(prompts)

    def state() -> list[Any]:
        modes = [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        ]
        return [torch.get_default_dtype(), torch.get_default_device(), *modes]

    before = state()
    try:
        Rewards(reward)(["a"], ["b"], completion_ids=[[1]], columns={})
        assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(mode=False)
        torch.set_autocast_enabled("cpu", bool(0))
        torch.set_grad_enabled(True)
