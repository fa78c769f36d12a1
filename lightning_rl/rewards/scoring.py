"""Scoring: calls every reward function, and turns what it cannot score into a missing reward, never into 0."""

import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.naming import name_of

Reward = Callable[..., Sequence[float | None]]
"""``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``; None: does not apply to the
row.
"""

RewardSource = Reward | Sequence[Reward] | Mapping[str, Reward | tuple[Reward, float]]
"""One function, several, which are named after themselves, or a mapping from a name to a function or to one with its
weight: what its value is multiplied with in the sum, 1 by default. A weight of 0 only logs.
"""

Item = TypeVar("Item")

RESERVED = frozenset({"task", "shaped", "missing"})


class RewardCall(NamedTuple):
    """One call of one reward function; what is not plain is left out of saved files.

    Attributes:
        name: of the function.
        completion_ids: as it was given them.
        values: as it gave them.
        seconds: how long it took.
        prompts: as it was given them.
        completions: as it was given them.
        columns: as it was given them.
        function: itself.
    """

    name: str
    completion_ids: Sequence[Sequence[int]]
    values: Sequence[float | None]
    seconds: float
    prompts: Sequence[Any] = ()
    completions: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    function: Callable[..., Any] | None = None


class Scores(NamedTuple):
    """What the reward functions said about each row."""

    total: Float[Tensor, " B"]  # weighted sum; 0 where the row is not scored
    raw: dict[str, Float[Tensor, " B"]]  # each function's own value; NaN where it gave none
    scored: Bool[Tensor, " B"]  # at least one function applied, and none of non-zero weight failed
    calls: Sequence[RewardCall] = ()  # every call that returned


class Rewards:
    """Reward functions with names and weights.

    Args:
        rewards: a function, several, or a mapping from name to function or (function, weight).

    Raises:
        ValueError: if there is no function, two share a name, or a weight is not finite.
    """

    def __init__(self, rewards: RewardSource) -> None:
        if callable(rewards):
            rewards = [rewards]
        named = list(rewards.items()) if isinstance(rewards, Mapping) else [(name_of(f), f) for f in rewards]
        names = [name for name, _ in named]
        pairs = {name: entry if isinstance(entry, tuple) else (entry, 1.0) for name, entry in named}
        if RESERVED & pairs.keys():
            raise ValueError(
                f"expected other names of rewards than {sorted(RESERVED)}, under which their sum is logged"
            )
        if not pairs or len(pairs) != len(names):
            raise ValueError(f"expected reward functions with different names, got {names}")
        for name, pair in pairs.items():
            if len(pair) != 2 or not callable(pair[0]) or not math.isfinite(pair[1]):
                raise ValueError(f"expected a function or (function, finite weight) for reward {name}, got {pair}")
        self.functions = {name: function for name, (function, _) in pairs.items()}
        self.weights = {name: float(weight) for name, (_, weight) in pairs.items()}

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
        calls: list[RewardCall] = []
        for name, function in self.functions.items():
            _check_signature(name, function, columns)
            batch = _Batch(name, function, prompts, completions, completion_ids, columns)
            values = batch.values(calls)
            missing = torch.tensor([value is None for value in values], dtype=torch.bool)
            exact = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
            finite = torch.isfinite(exact)
            raw[name] = torch.where(finite, exact, math.nan).to(dtype)
            if self.weights[name] != 0:
                applied, failed = applied | finite, failed | ~(finite | missing)
                total = total + torch.where(finite, exact, 0.0) * self.weights[name]
        for row in (~applied & ~failed).nonzero()[:, 0].tolist():
            _warn("functions", "no value", prompts[row], str(completions[row]))
        scored = applied & ~failed & torch.isfinite(total.to(dtype))
        return Scores(torch.where(scored, total, 0.0).to(dtype), raw, scored, calls)


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


class _Batch(NamedTuple):
    """One function with the rows that it scores."""

    name: str
    function: Reward
    prompts: Sequence[Any]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def values(self, calls: list[RewardCall]) -> list[float | None]:
        """The function's values; a failure of the whole batch is narrowed down to the rows that cause it."""
        if not len(self.prompts):
            return []
        try:
            values = self._call(range(len(self.prompts)), calls)
        except _RewardError:
            return [self._value(row, calls) for row in range(len(self.prompts))]
        for row, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                _warn(self.name, f"the value {value}", self.prompts[row], self.completions[row])
        return values

    def _value(self, row: int, calls: list[RewardCall]) -> float | None:
        try:
            return self._call([row], calls)[0]
        except _RewardError as error:
            _warn(self.name, repr(error.__cause__), self.prompts[row], self.completions[row])
            return math.nan

    def _call(self, rows: Sequence[int], calls: list[RewardCall]) -> list[float | None]:
        prompts, completions = _select(self.prompts, rows), _select(self.completions, rows)
        ids = _select(self.completion_ids, rows)
        columns = {key: _select(column, rows) for key, column in self.columns.items()}
        begin = time.perf_counter()
        try:
            values = list(self.function(prompts, completions, completion_ids=ids, **columns))
        except Exception as error:  # the boundary to foreign code: any failure takes out its rows and no others
            raise _RewardError from error
        seconds = time.perf_counter() - begin
        if len(values) != len(rows):
            raise ValueError(f"expected {len(rows)} values from reward {self.name}, got {len(values)}")
        values = [None if value is None else float(value) for value in values]
        calls.append(RewardCall(self.name, ids, values, seconds, prompts, completions, columns, self.function))
        return values


class _RewardError(Exception):
    """Carries whatever a user's function raised."""


def _warn(name: str, what: str, prompt: Any, completion: str) -> None:
    warnings.warn(
        f"reward {name} gave {what} for completion {completion!r} of prompt {prompt!r}: the row gets no reward and "
        "enters no reward statistic",
        stacklevel=2,
    )


def _select(values: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    return [values[row] for row in rows]
