"""Calls of all reward functions; a failed call gives a missing reward, never 0."""

import inspect
import math
import re
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Self, cast

import torch
from jaxtyping import Bool, Float
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from transformers import TrainerState

from lightning_rl.processes.errors import INTERRUPT, INVALID, TIMEOUT
from lightning_rl.processes.timeouts import CLOCK, RewardTimeoutError, remaining
from lightning_rl.rewards.reward_call import CallStyle, Notes, Reward, completion_form
from lightning_rl.rewards.subprocess_reward import Submitted, SubprocessReward
from lightning_rl.rewards.text import column_of
from lightning_rl.rewards.values import InvalidRewardError, values_of
from lightning_rl.samples import Failure, RewardCall, Rows
from lightning_rl.signal.rounded_sum import rounded_sum
from lightning_rl.utils.arguments import check_numbers, check_rows
from lightning_rl.utils.event_loop import EventLoop
from lightning_rl.utils.naming import check_columns, in_words, name_of
from lightning_rl.utils.places import MODULE, check_place
from lightning_rl.utils.torch_state import preserve_torch_state

RewardSource = (
    Reward | Mapping[str, tuple[Reward, float] | Reward] | Sequence[Reward]
)  # jsonargparse tries the types in order: a class_path is a reward, not a mapping
"""A function, a list of functions, or a mapping from names to functions or (function, weight).

The total reward is the weighted sum; weights are 1 by default. A function of weight 0 is only logged.
"""

RESERVED = frozenset({"task", "shaped", "missing", "failed", "greedy"})
SECONDS = 300.0
LOOP = EventLoop("rewards")


class Scores(NamedTuple):
    """Rewards of each row, in float64."""

    total: Float[Tensor, " B"]  # weighted sum, as in rounded_sum; 0 if the row is not scored
    raw: dict[str, Float[Tensor, " B"]]  # values of each function, by importance; NaN where missing
    scored: Bool[Tensor, " B"]  # at least one function applied, and the row did not fail
    failed: Bool[Tensor, " B"]  # a function of non-zero weight failed, or the total is too large for its dtype
    calls: Sequence[RewardCall] = ()


@dataclass(frozen=True, eq=False)
class Rewards:
    """Reward functions with names and weights.

    Args:
        functions: A function, a list of functions, or a mapping from name to function or (function, weight).
        timeout: Time limit in seconds of a call in the main thread of this process, or of a coroutine; None for no
            limit.
        max_failure_rate: The run ends with a checkpoint if rewards failed on at least this fraction of a rollout's
            rows; None disables the check.

    Raises:
        ValueError: If there is no function, a name is duplicate, invalid or taken by another metric, a weight is not
            finite, or an option is out of range.
    """

    functions: RewardSource
    _: KW_ONLY
    timeout: float | None = SECONDS
    max_failure_rate: float | None = 1.0

    def __post_init__(self) -> None:
        """Check the options, and convert the functions to a mapping from name to (function, weight)."""
        check_numbers(above=0, finite=True, optional=True, timeout=self.timeout)
        check_numbers(above=0, at_most=1, optional=True, max_failure_rate=self.max_failure_rate)
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

    @property
    def by_name(self) -> dict[str, Reward]:
        """Functions by name."""
        return {name: function for name, (function, _) in self.sources.items()}

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
    ) -> Scores:
        """Score every row; a row on which a function of non-zero weight fails is not scored.

        Args:
            prompts: Prompts as in the data.
            completions: Texts of the completions.
            completion_ids: Token ids of each completion.
            columns: Other data columns, one value per row.
            dtype: Dtype of the update, which has to hold every total; scores are in float64.
            trainer_state: State for functions that take ``trainer_state``; None without a trainer.
            started: Result of :meth:`start` for the same rows.

        Raises:
            TypeError: If the signature of a function is not that of a reward.
        """
        rows = _rows(prompts, completions, completion_ids, columns)
        return self._combine(self._call_all(rows, trainer_state, started), rows, dtype)

    def _call_all(
        self, rows: Rows, trainer_state: TrainerState | None, started: Mapping[str, Submitted] | None
    ) -> list[RewardCall]:
        """Call every function; calls in subprocesses and asynchronous ones run concurrently."""
        if not len(rows):  # without rows there are no columns either
            return []
        styles = {name: CallStyle.of(name, function, list(rows.columns)) for name, function in self.by_name.items()}
        drafts = [_Draft(name, function, rows) for name, function in self.by_name.items()]
        started = {} if started is None else started
        in_subprocess = {draft.name: draft.function for draft in drafts if isinstance(draft.function, SubprocessReward)}
        submitted = {
            name: started[name] if name in started else function.submit(rows, styles[name], trainer_state)
            for name, function in in_subprocess.items()
        }
        for draft in drafts:
            if draft.name not in in_subprocess:
                draft.call(styles[draft.name], trainer_state, self.timeout)
        _await_all([(draft, draft.future) for draft in drafts if draft.future is not None], self.timeout)
        for draft in drafts:
            if draft.name in in_subprocess:
                draft.collect(in_subprocess[draft.name], submitted[draft.name])
        return [draft.finish() for draft in drafts]

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
        return {name: f.submit(rows, CallStyle.of(name, f, list(columns))) for name, f in self._early.items()}

    def close(self) -> None:
        """End the subprocesses of functions."""
        for function in self.by_name.values():
            if isinstance(function, SubprocessReward):
                function.close()

    def _combine(self, calls: Sequence[RewardCall], rows: Rows, dtype: torch.dtype) -> Scores:
        applied, failed = torch.zeros(len(rows), dtype=torch.bool), torch.zeros(len(rows), dtype=torch.bool)
        raw: dict[str, Tensor] = {name: torch.zeros(0, dtype=torch.float64) for name in self.by_importance}
        weighted: dict[str, Tensor] = {}
        for call in calls:
            missing = torch.tensor([value is None for value in call.values], dtype=torch.bool)
            exact = torch.tensor([math.nan if value is None else value for value in call.values], dtype=torch.float64)
            finite = torch.isfinite(exact)
            raw[call.name] = torch.where(finite, exact, math.nan)
            if (weight := self.weights[call.name]) != 0:
                applied, failed = applied | finite, failed | ~(finite | missing)
                weighted[call.name] = torch.where(finite, exact, 0.0) * weight
        total = rounded_sum([*weighted.values()] or [torch.zeros(len(rows), dtype=torch.float64)])
        _warn_of_no_value((~applied & ~failed).nonzero()[:, 0].tolist(), rows)
        if (overflow := applied & ~failed & ~torch.isfinite(total.to(dtype))).any():
            name = max(weighted, key=lambda name: float(weighted[name][overflow].abs().max()))
            rows_of_it, cause = tuple(overflow.nonzero()[:, 0].tolist()), f"makes a total reward too large for {dtype}"
            failure = Failure(rows_of_it, cause, kind=INVALID)
            calls = [call._replace(failures=[*call.failures, failure]) if call.name == name else call for call in calls]
        failed = failed | overflow
        scored = applied & ~failed
        return Scores(torch.where(scored, total, 0.0), raw, scored, failed, calls)


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


@dataclass(slots=True)
class _Draft:
    """Call in progress: holds a result, a failure or an awaitable."""

    name: str
    function: Reward
    rows: Rows
    notes: Notes = field(init=False)
    seconds: float = 0.0
    future: "Future[Any] | None" = None
    values: list[float | None] | None = None
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notes = Notes(len(self.rows))

    def call(self, style: CallStyle, trainer_state: TrainerState | None, seconds: float | None) -> None:
        """Call the function in this process; a coroutine is started."""
        returned = self.store(lambda: CLOCK.run(lambda: self._values(style, trainer_state), seconds))
        if inspect.isawaitable(returned):
            self.future = _start(returned)
        else:
            self.values = returned

    def store(self, call: Callable[[], Any]) -> Any:
        """Return the result of a function; if it raises, mark every row as failed and return None."""
        begin = time.perf_counter()
        try:
            with preserve_torch_state():
                return call()
        except (KeyboardInterrupt, SIGTERMException):  # from a signal, not from the function
            raise
        except BaseException as error:  # noqa: BLE001  the boundary to foreign code, which may call exit() as well
            self.fail(error)
        finally:
            self.seconds += time.perf_counter() - begin

    def _values(self, style: CallStyle, trainer_state: TrainerState | None) -> Any:
        """Return the result of the function; a generator runs here, within the time limit."""
        returned = style.call(self.function, self.rows.copy(), self.notes, trainer_state)
        return returned if inspect.isawaitable(returned) else values_of(returned, len(self.rows))

    def collect(self, function: SubprocessReward, submitted: Submitted) -> None:
        """Wait for a call in other processes."""
        begin = time.perf_counter()
        self.values, self.failures = function.collect(submitted, self.notes)
        self.seconds = time.perf_counter() - begin

    def fail(self, error: BaseException) -> None:
        """Mark every row as failed."""
        self.failures.append(Failure(tuple(range(len(self.rows))), _cause(error), _traceback(error), _kind(error)))

    def finish(self) -> RewardCall:
        """Return the record of the call, with a failure for every row whose value is not finite."""
        values, rows, notes = self.values or [math.nan] * len(self.rows), self.rows, self.notes
        known = {row for failure in self.failures for row in failure.rows}
        returned: dict[str, list[int]] = {}
        for row, value in enumerate(values):
            if value is not None and not math.isfinite(value) and row not in known:
                returned.setdefault(f"returned {value}", []).append(row)
        return RewardCall(
            self.name,
            rows.completion_ids,
            values,
            self.seconds,
            rows.prompts,
            rows.completions,
            rows.columns,
            self.function,
            [*self.failures, *(Failure(tuple(bad), cause, kind=INVALID) for cause, bad in returned.items())],
            notes.extras,
            notes.metrics,
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


def return_alone(name: str, function: Reward, rows: Rows) -> Any:
    """Return the unchecked result of a function outside of a run; it may raise or edit the rows."""
    returned = CallStyle.of(name, function, list(rows.columns)).call(function, rows, Notes(len(rows)))
    return _start(returned).result() if inspect.isawaitable(returned) else returned


def _start(awaitable: Awaitable[Any]) -> "Future[Any]":
    """Start an awaitable in the event loop and return its future."""

    async def result() -> Any:
        return await awaitable

    return LOOP.start(result())


def _await_all(drafts: "Sequence[tuple[_Draft, Future[Any]]]", seconds: float | None) -> None:
    """Await all coroutines concurrently; one that blocks the event loop fails the others as well."""
    if not drafts:
        return
    begin, late, kind = time.perf_counter(), f"took longer than {seconds or 0:g} s", TIMEOUT
    try:
        CLOCK.run(lambda: wait([future for _, future in drafts], remaining(seconds)), None)
    except RewardTimeoutError as error:
        late, kind = str(error), error.kind
    unfinished = [future for _, future in drafts if not future.done()]
    block = LOOP.find_block() if unfinished and kind != INTERRUPT else ""
    if block:
        late += (
            ", because a coroutine blocks the event loop of rewards: use an asynchronous client or asyncio.to_thread"
        )
    for draft, future in drafts:
        if future in unfinished:
            future.cancel()
            draft.failures.append(Failure(tuple(range(len(draft.rows))), late, block, kind))
        else:
            draft.values = draft.store(lambda future=future, draft=draft: values_of(future.result(), len(draft.rows)))
        draft.seconds += time.perf_counter() - begin


def _cause(error: BaseException) -> str:
    if isinstance(error, RewardTimeoutError):
        return str(error)
    if isinstance(error, InvalidRewardError):
        return f"returned invalid rewards: {error}"
    return f"raised {error!r:.500}"


def _kind(error: BaseException) -> str:
    if isinstance(error, RewardTimeoutError):
        return error.kind
    return INVALID if isinstance(error, InvalidRewardError) else type(error).__name__


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _warn_of_no_value(rows: Sequence[int], samples: Rows) -> None:
    rows = [row for row in rows if samples.completion_ids[row]]  # skip empty completions
    if rows:
        others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        warnings.warn(
            f"no reward function applies to completion {samples.completions[rows[0]]!r:.1000} of prompt "
            f"{samples.prompts[rows[0]]!r:.1000}{others}: the row gets no reward and is left out of reward statistics",
            stacklevel=2,
        )
