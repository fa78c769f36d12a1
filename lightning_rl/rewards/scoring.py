"""Scoring: calls every reward function, and turns what it cannot score into a missing reward, never into 0."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Reward = Callable[..., Sequence[float | None]]
"""``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``; None: does not apply to the
row.
"""

Item = TypeVar("Item")

RESERVED = frozenset({"task", "shaped", "missing"})


class Scores(NamedTuple):
    """What the reward functions said about each row."""

    total: Float[Tensor, " B"]  # weighted sum; 0 where the row is not scored
    raw: dict[str, Float[Tensor, " B"]]  # each function's own value; NaN where it gave none
    scored: Bool[Tensor, " B"]  # at least one function applied, and none of non-zero weight failed


class Rewards:
    """Reward functions with names and weights.

    Args:
        functions: functions, named after themselves, or a mapping from name to function.
        weights: what each value is multiplied with in the sum; 1 by default. A weight of 0 only logs.

    Raises:
        ValueError: if there is no function, two share a name, or the weights do not fit.
    """

    def __init__(
        self, functions: Sequence[Reward] | Mapping[str, Reward], weights: Sequence[float] | None = None
    ) -> None:
        named = functions.items() if isinstance(functions, Mapping) else [(_name(f), f) for f in functions]
        self.functions = dict(named)
        if RESERVED & self.functions.keys():
            raise ValueError(
                f"expected other names of rewards than {sorted(RESERVED)}, under which their sum is logged"
            )
        if not self.functions or len(self.functions) != len(list(named)):
            raise ValueError(f"expected reward functions with different names, got {[name for name, _ in named]}")
        self.weights = dict(zip(self.functions, weights or [1.0] * len(self.functions), strict=False))
        if not all(math.isfinite(weight) for weight in self.weights.values()):
            raise ValueError(f"expected finite reward weights, got {list(self.weights.values())}")
        if weights is not None and len(weights) != len(self.functions):
            raise ValueError(f"expected {len(self.functions)} reward weights, got {len(weights)}")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        dtype: torch.dtype = torch.float32,
    ) -> Scores:
        """Scores every row.

        A function that raises, or gives NaN or infinity, for a row takes that row out, with a warning that shows it.
        """
        total = torch.zeros(len(prompts), dtype=torch.float64)
        applied, failed = torch.zeros(len(prompts), dtype=torch.bool), torch.zeros(len(prompts), dtype=torch.bool)
        raw: dict[str, Tensor] = {}
        for name, function in self.functions.items():
            _check_signature(name, function, columns)
            values = _values(name, function, prompts, completions, completion_ids, columns)
            finite = torch.tensor([value is not None and math.isfinite(value) for value in values], dtype=torch.bool)
            broken = torch.tensor(
                [value is not None and not math.isfinite(value) for value in values], dtype=torch.bool
            )
            exact = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
            raw[name] = torch.where(finite, exact, math.nan).to(dtype)
            if self.weights[name] != 0:
                applied, failed = applied | finite, failed | broken
                total = total + torch.where(finite, exact, 0.0) * self.weights[name]
        for row in (~applied & ~failed).nonzero()[:, 0].tolist():
            _warn("functions", "no value", prompts[row], str(completions[row]))
        scored = applied & ~failed & torch.isfinite(total.to(dtype))
        return Scores(torch.where(scored, total, 0.0).to(dtype), raw, scored)


def _check_signature(name: str, function: Reward, columns: Mapping[str, Sequence[Any]]) -> None:
    """Raises a TypeError at once for a function that cannot be called like a reward, which no row is to blame for."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind([], [], completion_ids=[], **columns)
    except TypeError as error:
        raise TypeError(
            f"expected reward {name} to accept (prompts, completions, *, completion_ids, **columns) with the columns "
            f"{sorted(columns)}, got {name}{signature}: {error}"
        ) from error


def _values(
    name: str,
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[float | None]:
    """One function's values; a failure of the whole batch is narrowed down to the rows that cause it."""
    if not len(prompts):
        return []

    def call(rows: Sequence[int]) -> list[float | None]:
        return _called(
            name,
            function,
            _picked(prompts, rows),
            _picked(completions, rows),
            completion_ids=_picked(completion_ids, rows),
            **{key: _picked(column, rows) for key, column in columns.items()},
        )

    try:
        values = call(range(len(prompts)))
    except _RewardError:
        values = []
        for row in range(len(prompts)):
            try:
                values += call([row])
            except _RewardError as error:
                _warn(name, repr(error.__cause__), prompts[row], completions[row])
                values.append(math.nan)
        return values
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            _warn(name, f"the value {value}", prompts[row], completions[row])
    return values


class _RewardError(Exception):
    """Carries whatever a user's function raised."""


def _called(name: str, function: Reward, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list:
    try:
        values = list(function(prompts, completions, **columns))
    except Exception as error:  # the boundary to foreign code: any failure takes out its rows and no others
        raise _RewardError from error
    if len(values) != len(prompts):
        raise ValueError(f"expected {len(prompts)} values from reward {name}, got {len(values)}")
    return [None if value is None else float(value) for value in values]


def _warn(name: str, what: str, prompt: Any, completion: str) -> None:
    warnings.warn(
        f"reward {name} gave {what} for completion {completion!r} of prompt {prompt!r}: the row gets no reward and "
        "enters no reward statistic",
        stacklevel=2,
    )


def _picked(values: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    return [values[row] for row in rows]


def _name(function: Reward) -> str:
    return getattr(function, "__name__", type(function).__name__)
