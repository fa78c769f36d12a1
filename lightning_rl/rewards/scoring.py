"""Calls of all reward functions; a failed call gives a missing reward, never 0."""

import inspect
import math
import re
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any, Self, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import TrainerState

from lightning_rl.distributed import RunEndError
from lightning_rl.processes.errors import INTERRUPT, INVALID, TIMEOUT
from lightning_rl.processes.ray_pool import RayWorkers, fleet_of
from lightning_rl.processes.timeouts import CLOCK, LONGEST, RewardTimeoutError, remaining
from lightning_rl.rewards.reward_call import CallStyle, Reward, completion_form
from lightning_rl.rewards.sandbox import close_sandboxes
from lightning_rl.rewards.submitted import LOOP, Submitted
from lightning_rl.rewards.subprocess_reward import SubprocessReward
from lightning_rl.rewards.text import column_of
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Failure, RewardCall, Rows
from lightning_rl.signal.rounded_sum import rounded_sum
from lightning_rl.utils.arguments import check_numbers, check_rows
from lightning_rl.utils.naming import check_columns, in_words, name_of
from lightning_rl.utils.places import MODULE, check_place

RewardSource = (
    Reward | Mapping[str, tuple[Reward, float] | Reward] | Sequence[Reward]
)  # jsonargparse tries the types in order: a class_path is a reward, not a mapping
"""A function, a list of functions, or a mapping from names to functions or (function, weight).

The total reward is the weighted sum; weights are 1 by default. A function of weight 0 is only logged.
"""

RESERVED = frozenset({"task", "shaped", "missing", "failed", "greedy"})
SECONDS = 300.0


class RewardError(RunEndError):
    """Rewards failed on more rows of a rollout than ``max_failure_rate`` allows."""


@dataclass(frozen=True, eq=False)
class Rewards:
    """Reward functions with names and weights.

    Args:
        functions: A function, a list of functions, or a mapping from name to function or (function, weight).
        timeout: Time limit in seconds of a call in the main thread of this process, or of a coroutine; None for no
            limit.
        max_failure_rate: The run ends with a checkpoint if rewards failed on at least this fraction of a rollout's
            rows; None disables the check.
        workers: Workers of a Ray cluster for each ``SubprocessReward`` and, as if it was one with the time limit
            ``timeout``, each function that is neither a coroutine nor an object such as ``ExactMatch()``; None for no
            cluster.

    Raises:
        ValueError: If there is no function, a name is duplicate, invalid or taken by another metric, a weight is not
            finite, or an option is out of range.
    """

    functions: RewardSource
    _: KW_ONLY
    timeout: float | None = SECONDS
    max_failure_rate: float | None = 1.0
    workers: RayWorkers | None = None

    def __post_init__(self) -> None:
        """Check the options, and convert the functions to a mapping from name to (function, weight)."""
        check_numbers(above=0, finite=True, optional=True, timeout=self.timeout)
        check_numbers(above=0, at_most=1, optional=True, max_failure_rate=self.max_failure_rate)
        if not isinstance(self.workers, RayWorkers | None):
            wanted = f"workers to be RayWorkers or None, got {self.workers!r:.200}"
            raise ValueError(f"expected {wanted}: SubprocessReward(processes=) takes processes on this machine")
        check_place(f"rewards={MODULE}", self.functions)
        pairs = _pairs(self.functions)
        check_reward_names(list(pairs))
        for name, pair in pairs.items():
            if len(pair) != 2 or not callable(pair[0]):
                raise ValueError(f"expected a function or (function, finite weight) for reward {name}, got {pair}")
            if isinstance(pair[0], type):
                raise ValueError(f"expected an object as reward {name}, got the class {pair[0].__name__}: call it")
            weight: dict[str, Any] = {f"the weight of reward {name}": pair[1]}
            check_numbers(finite=True, **weight)
        named = {name: (function, float(weight)) for name, (function, weight) in pairs.items()}
        object.__setattr__(self, "functions", named)

    @classmethod
    def of(cls, rewards: Any) -> Self:
        """Return rewards for rewards or a source."""
        return rewards if isinstance(rewards, cls) else cls(rewards)

    @cached_property
    def by_name(self) -> dict[str, Reward]:
        """Functions by name, as they are called: those that run on workers are each a SubprocessReward."""
        return {name: self._place(function) for name, (function, _) in self.sources.items()}

    def _place(self, function: Reward) -> Reward:
        if self.workers is not None and isinstance(function, SubprocessReward):
            return function.on(self.workers)
        if self.workers is None or not inspect.isroutine(function) or inspect.iscoroutinefunction(function):
            return function
        return SubprocessReward(function, processes=self.workers, seconds=self.timeout or LONGEST)

    def check_workers(self) -> None:
        """Wait until a worker on the Ray cluster has started, if functions run there.

        Raises:
            ValueError: If there is no cluster.
            CallError: If no worker can start.
        """
        pools = (one.processes for one in self.by_name.values() if isinstance(one, SubprocessReward))
        for workers in {one for one in pools if isinstance(one, RayWorkers)}:
            fleet = fleet_of(workers)
            fleet.give(fleet.take())

    @property
    def weights(self) -> dict[str, float]:
        """Weights by name."""
        return {name: weight for name, (_, weight) in self.sources.items()}

    @property
    def sources(self) -> dict[str, tuple[Reward, float]]:
        """Functions and weights by name."""
        return cast(dict[str, tuple[Reward, float]], self.functions)

    @property
    def by_importance(self) -> list[str]:
        """Names, those of positive weight first."""
        return sorted(self.weights, key=lambda name: self.weights[name] <= 0)

    def check_weights(self) -> None:
        """Check that a reward has a non-zero weight.

        Raises:
            ValueError: If all weights are 0.
        """
        if not any(self.weights.values()):
            raise ValueError(
                f"expected a reward with a non-zero weight to train with, got {self.weights}: give one of them a weight"
            )

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data have every column that the signature or an option of a function names.

        Raises:
            TypeError: If the signature of a function needs another column.
            ValueError: If an option names another column.
        """
        for name, function in self.by_name.items():
            CallStyle.of(name, function, list(columns))
            for column, option in getattr(_inner(function), "columns_read", {}).items():
                column_of(dict.fromkeys(columns, ()), column, 0, option=option, reward=function)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        dtype: torch.dtype = torch.float32,
        trainer_state: TrainerState | None = None,
        started: Mapping[str, Submitted] | None = None,
    ) -> list[RewardCall]:
        """Call every function on every row; :meth:`fill` weighs the values.

        Calls in subprocesses and asynchronous ones run concurrently.

        Args:
            prompts: Prompts as in the data.
            completions: Texts of the completions.
            completion_ids: Token ids of each completion.
            columns: Other data columns, one value per row.
            dtype: Dtype of the update; a row fails whose total it cannot hold.
            trainer_state: State for functions that take ``trainer_state``; None without a trainer.
            started: Result of :meth:`start` for the same rows.

        Raises:
            TypeError: If the signature of a function is not that of a reward.
        """
        rows = _rows(prompts, completions, completion_ids, columns)
        if not len(rows):  # without rows there are no columns either
            return []
        calls = {name: Submitted.of(name, function, rows) for name, function in self.by_name.items()}
        calls |= started or {}
        elsewhere = {name: one for name, one in self.by_name.items() if isinstance(one, SubprocessReward)}
        for name, function in elsewhere.items():
            if name not in (started or {}):
                function.submit(calls[name], trainer_state)
        here = [call for name, call in calls.items() if name not in elsewhere]
        for call in here:
            call.call(trainer_state, self.timeout)
        _await_all([call for call in here if call.tasks], self.timeout)
        for name, function in elsewhere.items():
            function.collect(calls[name])
        return self._check_totals([call.finish() for call in calls.values()], rows, dtype)

    def _check_totals(self, calls: list[RewardCall], rows: Rows, dtype: torch.dtype) -> list[RewardCall]:
        """Add a failure for the rows whose total is too large, and warn of rows without a value."""
        total, applied = self._totals(calls, len(rows))
        failed = self.failed_rows(calls, len(rows))
        _warn_of_no_value((~applied & ~failed).nonzero()[:, 0].tolist(), rows)
        if not (overflow := applied & ~failed & ~torch.isfinite(total.to(dtype))).any():
            return calls
        parts = self._weighted_values(calls)
        largest = max(parts, key=lambda name: float(parts[name][overflow].nan_to_num(0.0).abs().max()))
        large = tuple(overflow.nonzero()[:, 0].tolist())
        failure = Failure(large, f"makes a total reward too large for {dtype}", kind=INVALID)
        return [call._replace(failures=[*call.failures, failure]) if call.name == largest else call for call in calls]

    def fill(self, rollout: Rollout, calls: Sequence[RewardCall]) -> Rollout:
        """Return the rows with their rewards: the weighted sum, the value of each function, and the rewarded rows.

        A row on which a function of non-zero weight failed, or to which none applies, is not rewarded.
        """
        total, applied = self._totals(calls, len(rollout))
        scored = applied & ~self.failed_rows(calls, len(rollout))
        values = {call.name: _exact(call) for call in calls}
        empty = torch.zeros(0, dtype=torch.float64)
        return rollout.replace(
            rewards=torch.where(scored, total, 0.0),
            rewards_by_function={name: values.get(name, empty) for name in self.by_importance},
            rewarded=scored & rollout.trained,
        )

    def failed_rows(self, calls: Sequence[RewardCall], number: int) -> Bool[Tensor, " B"]:
        """Return a mask of the rows, ``number`` in all, that functions of non-zero weight failed on."""
        failures = [failure for call in calls if self.weights[call.name] for failure in call.failures]
        failed = torch.zeros(number, dtype=torch.bool)
        failed[torch.tensor([row for failure in failures for row in failure.rows], dtype=torch.long)] = True
        return failed

    def _weighted_values(self, calls: Sequence[RewardCall]) -> dict[str, Float[Tensor, " B"]]:
        """Return the values of each function of non-zero weight times the weight; NaN for rows without one."""
        return {call.name: _exact(call) * self.weights[call.name] for call in calls if self.weights[call.name]}

    def _totals(self, calls: Sequence[RewardCall], number: int) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Return the weighted sum of each row's values, as in :func:`rounded_sum`, and a mask of rows with a value."""
        parts = [*self._weighted_values(calls).values(), torch.full((number,), math.nan, dtype=torch.float64)]
        applied = ~torch.stack(parts).isnan().all(0)
        return rounded_sum([part.where(~part.isnan(), 0.0) for part in parts[: max(len(parts) - 1, 1)]]), applied

    @property
    def starts_early(self) -> bool:
        """True if :meth:`start` can start a call."""
        return bool(self._early)

    @property
    def _early(self) -> dict[str, SubprocessReward]:
        """SubprocessReward functions that do not take ``trainer_state``."""
        return {name: f for name, f in self.by_name.items() if isinstance(f, SubprocessReward) and f.starts_early}

    def start(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> dict[str, Submitted]:
        """Start the calls that do not need the trainer: functions in subprocesses without ``trainer_state``.

        Takes the rows of the call; returns its argument ``started``.
        """
        if not self._early or not prompts:
            return {}
        rows = _rows(prompts, completions, completion_ids, columns)
        return {name: function.submit(Submitted.of(name, function, rows)) for name, function in self._early.items()}

    def close(self) -> None:
        """End the subprocesses of functions."""
        for function in self.by_name.values():
            if isinstance(function, SubprocessReward):
                function.close()
        close_sandboxes()


def _exact(call: RewardCall) -> Float[Tensor, " B"]:
    """Return the values of a call in float64; NaN where the function does not apply or failed."""
    values = torch.tensor([math.nan if value is None else value for value in call.values], dtype=torch.float64)
    return torch.where(torch.isfinite(values), values, math.nan)


def _inner(function: Reward) -> Reward:
    """Return the function that a SubprocessReward calls."""
    return function.reward if isinstance(function, SubprocessReward) else function


def may_read(function: Reward, column: str) -> bool:
    """Return False if a function does not read a column, by its ``columns_read``, its signature and its source."""
    function = _inner(function)
    if (declared := getattr(function, "columns_read", None)) is not None:
        return column in declared
    try:
        parameters = inspect.signature(function).parameters
        rest = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
        if rest is None or column in parameters:
            return column in parameters
        called = function.func if isinstance(function, partial) else function
        source = inspect.getsource(called if inspect.isroutine(called) else type(called))
    except (OSError, TypeError, ValueError):  # without signature or source
        return True
    whole = re.findall(rf"\b{rest}\b(?!\[[\"']|\.get\([\"'])", source)  # one is in the signature
    return column in source or len(whole) > 1


def _pairs(rewards: RewardSource) -> dict[str, tuple[Any, Any]]:
    """Return function and weight by name.

    Raises:
        ValueError: If the argument is of another type or empty, or two functions share a name.
    """
    if callable(rewards):
        rewards = [rewards]
    if isinstance(rewards, str) or not isinstance(rewards, Mapping | Sequence):
        raise ValueError(
            "expected rewards to be a function, a list of functions, or a mapping from names to functions or "
            f"(function, weight), got {rewards!r}: pass one such as lightning_rl.rewards.NumberMatch()"
        )
    if not rewards:
        raise ValueError(
            f"expected at least one reward function, got {rewards!r}: pass one such as "
            "lightning_rl.rewards.NumberMatch()"
        )
    if isinstance(rewards, Mapping):
        entries: Mapping[str, Any] = rewards
        return {name: _pair(entry) for name, entry in entries.items()}
    if other := [item for item in rewards if not callable(item)]:
        pairs = [rewards] if isinstance(other[0], Real) else [_pair(item) for item in rewards]
        known = all(len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], Real) for pair in pairs)
        calls = [name_of(pair[0]) + ("" if hasattr(pair[0], "__name__") else "(...)") for pair in pairs if known]
        names = [name_of(pair[0]) for pair in pairs if known]
        names = [f"{name}_{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]
        written = [f"{name!r}: ({call}, {pair[1]})" for name, call, pair in zip(names, calls, pairs, strict=False)]
        raise ValueError(
            f"expected a list of functions, got {other[0]!r:.80}: write "
            f"{{{', '.join(written) or repr('name') + ': (function, 0.5)'}}} to give weights"
        )
    names = [name_of(function) for function in rewards]
    if len(set(names)) < len(names):
        raise ValueError(
            f"expected reward functions with different names, got {names}: pass a mapping {{name: function}} with "
            "different names"
        )
    return {name: (function, 1.0) for name, function in zip(names, rewards, strict=True)}


def _pair(entry: Any) -> Any:
    """Return an entry of a mapping as (function, weight)."""
    return tuple(entry) if isinstance(entry, tuple | list) else (entry, 1.0)


def check_reward_names(names: Sequence[Any]) -> None:
    """Check that the names can be logged and do not collide.

    Raises:
        ValueError: If a name is not a string with a letter, is reserved, or extends another name.
    """
    if bad := [name for name in names if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"expected names of rewards to be strings of at least one letter, got {bad}")
    if RESERVED & set(names):
        raise ValueError(
            f"expected names of rewards other than {sorted(RESERVED)}, which are reserved for the sum, got "
            f"{in_words(sorted(RESERVED & set(names)))}: rename the reward"
        )
    for name in names:
        for other in {*names, *RESERVED}:
            if name.startswith(f"{other}/"):
                raise ValueError(
                    f'expected names of rewards of which none is the folder of another, got "{name}" beside "{other}", '
                    "which a logger that writes a file for each metric cannot hold together: rename one"
                )


def _rows(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> Rows:
    check_rows(len(completions), completions=completions, prompts=prompts, completion_ids=completion_ids)
    check_rows(len(completions), **columns)
    check_columns(columns, "the columns of rewards")
    forms = [completion_form(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    return Rows(prompts=prompts, completions=forms, completion_ids=completion_ids, columns=columns)


def _await_all(calls: Sequence[Submitted], seconds: float | None) -> None:
    """Await all coroutines concurrently; one that blocks the event loop fails the others as well."""
    if not calls:
        return
    begin, late, kind = time.perf_counter(), f"took longer than {seconds or 0:g} s", TIMEOUT
    futures = [future for call in calls for _, future in call.tasks]
    try:
        CLOCK.run(lambda: wait(futures, remaining(seconds)), None)
    except RewardTimeoutError as error:
        late, kind = str(error), error.kind
    unfinished = [future for future in futures if not future.done()]
    block = LOOP.find_block() if unfinished and kind != INTERRUPT else ""
    if block:
        late += (
            ", because a coroutine blocks the event loop of rewards: use an asynchronous client or asyncio.to_thread"
        )
    for call in calls:
        call.collect(unfinished, late, kind, block)
        call.seconds += time.perf_counter() - begin


def _warn_of_no_value(rows: Sequence[int], samples: Rows) -> None:
    rows = [row for row in rows if samples.completion_ids[row]]  # skip empty completions
    if rows:
        others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        warnings.warn(
            f"no reward function applies to completion {samples.completions[rows[0]]!r:.1000} of prompt "
            f"{samples.prompts[rows[0]]!r:.1000}{others}: the row gets no reward and is left out of reward statistics",
            stacklevel=2,
        )
