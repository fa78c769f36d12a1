"""Calls of reward functions: arguments, logged extras and the record of a call.

Source: the ``reward_funcs`` of TRL's GRPOTrainer, whose functions run unchanged.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import TrainerState

from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.mutation_guard import changed_entries, copy_plain
from lightning_rl.utils.naming import REWARD_ARGUMENTS, in_words, nearest

Reward = Callable[..., Any]
"""``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, or a coroutine function.

None means that the reward does not apply to the row.
"""

EXTRAS = ("trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class Failure:
    """Rows that a reward function failed to score; secrets in its texts are hidden.

    Attributes:
        rows: Row indices within the call.
        cause: Predicate of the sentence "reward x ...", such as "took longer than 3 s".
        traceback: Traceback of the exception, or an empty string.
    """

    rows: tuple[int, ...]
    cause: str
    traceback: str = ""

    def __post_init__(self) -> None:
        """Hide secrets, since exceptions of clients quote requests."""
        for name in ("cause", "traceback"):
            object.__setattr__(self, name, hide_secrets(getattr(self, name)))


class RewardCall(NamedTuple):
    """Record of one call of one reward function; saved files leave out values that are not plain data.

    Attributes:
        name: Name of the function.
        completion_ids: Token ids of each completion.
        values: Value of each row: a number, None if the reward does not apply, NaN if it failed.
        seconds: Duration of the call.
        prompts: Prompt of each row.
        completions: Completion of each row.
        columns: Data columns, one value per row.
        function: Reward function.
        failures: Rows without a value, by cause.
        extras: Columns logged with ``log_extra``.
        metrics: Numbers logged with ``log_metric``.
    """

    name: str
    completion_ids: Sequence[Sequence[int]]
    values: Sequence[float | None]
    seconds: float
    prompts: Sequence[Any] = ()
    completions: Sequence[Any] = ()
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    function: Callable[..., Any] | None = None
    failures: Sequence[Failure] = ()
    extras: Mapping[str, Sequence[Any]] = MappingProxyType({})
    metrics: Mapping[str, Sequence[float]] = MappingProxyType({})

    @property
    def rows(self) -> "Rows":
        """Arguments of the call."""
        return Rows(
            prompts=self.prompts, completions=self.completions, completion_ids=self.completion_ids, columns=self.columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples in the form that reward functions take.

    Args:
        prompts: Prompts as in the data.
        completions: Chat messages if the prompt is chat messages, else text.
        completion_ids: Token ids of each completion.
        columns: Other data columns, one value per row.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.prompts)

    def copy(self) -> "Rows":
        """Return a deep copy of the containers, so that one function cannot edit the arguments of another."""
        ids = [list(row) for row in self.completion_ids]
        values = copy_plain([self.prompts, self.completions, dict(self.columns)])
        return Rows(prompts=values[0], completions=values[1], completion_ids=ids, columns=values[2])

    def edits(self, given: "Rows") -> list[str]:
        """Return the names of the arguments that a function edited in its copy ``given`` of these rows."""
        before, after = (
            {"prompts": rows.prompts, "completions": rows.completions, "completion_ids": rows.completion_ids}
            for rows in (self, given)
        )
        return changed_entries({**before, **self.columns}, {**after, **given.columns})

    def select(self, rows: Sequence[int]) -> "Rows":
        """Return the given rows, in the given order, in new lists."""
        return Rows(
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            completion_ids=[self.completion_ids[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
        )


@dataclass(slots=True)
class Notes:
    """Extras and metrics that one call logs.

    Attributes:
        number: Number of rows of the call.
        extras: Columns, one value per row.
        metrics: Logged numbers by name, in order.
    """

    number: int
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Store a column beside the samples.

        Raises:
            ValueError: If the number of values is not the number of rows.
        """
        values = list(values)
        if len(values) != self.number:
            raise ValueError(f"expected {self.number} values in log_extra({column!r}, ...), got {len(values)}")
        self.extras[str(column)] = values

    def log_metric(self, name: str, value: Any) -> None:
        """Add a number to the metric ``reward_metric/<function>/<name>``; a number that is not finite is dropped."""
        if math.isfinite(number := float(value)):
            self.metrics.setdefault(str(name), []).append(number)


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Calling convention of one reward function.

    Args:
        by_keyword: Pass ``prompts`` and ``completions`` by keyword, as in TRL, rather than by position.
        extras: Names in :data:`EXTRAS` that the function takes.
    """

    by_keyword: bool = False
    extras: frozenset[str] = frozenset()

    @staticmethod
    def of(name: str, function: Reward, columns: Sequence[str]) -> "CallStyle":
        """Return the calling convention that a function's signature asks for.

        A function with a parameter named like an argument or a column gets every argument by keyword. A function whose
        positional parameters have other names gets prompts and completions by position.

        Raises:
            TypeError: If the signature is not that of a reward.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some built-in functions have no signature
            return CallStyle()
        extras = frozenset(key for key in EXTRAS if takes(function, key))
        rest = {"completion_ids": [], **dict.fromkeys(columns), **dict.fromkeys(extras)}
        by_keyword = _names_any(signature, {*REWARD_ARGUMENTS, *columns})
        try:
            if by_keyword:
                signature.bind(prompts=[], completions=[], **rest)
            else:
                signature.bind([], [], **rest)
        except TypeError as error:
            missing = [
                key
                for key in _parameters_to_give(signature, by_keyword=by_keyword)
                if key not in {"prompts", "completions", *rest}
            ]
            cure = (
                f": {error}"
                if not missing
                else (
                    f", which needs {in_words(missing)}: use the names of columns, or rename a "
                    f'column of the data, as in columns={{"{missing[0]}": '
                    f"{nearest(missing[0], columns) or '...'}}}"
                )
            )
            if "solution_str" in signature.parameters:
                cure = f": wrap a reward function of verl, as in VerlReward(compute_score={name})"
            raise TypeError(
                f"expected reward {name} to accept (prompts, completions, *, completion_ids, **columns) with the "
                f"columns {sorted(columns)}, got {name}{signature}{cure}"
            ) from error
        return CallStyle(by_keyword=by_keyword, extras=extras)

    def arguments(self, rows: Rows, extras: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for some rows, with the extras that the function takes."""
        keywords = {"completion_ids": rows.completion_ids, **rows.columns}
        keywords |= {name: value for name, value in extras.items() if name in self.extras}
        if self.by_keyword:
            return (), {"prompts": rows.prompts, "completions": rows.completions, **keywords}
        return (rows.prompts, rows.completions), keywords

    def call(self, function: Reward, rows: Rows, notes: Notes, state: TrainerState | None = None) -> Any:
        """Call the function and return its result, which may be awaitable."""
        extras = {
            "trainer_state": state or TrainerState(),
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
        }
        arguments, keywords = self.arguments(rows, extras)
        return function(*arguments, **keywords)


def _names_any(signature: inspect.Signature, known: Collection[str]) -> bool:
    """Return True if a positional parameter has a known name, or if there are only keyword parameters."""
    parameters = signature.parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return False
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if placed:
        return any(name in known for name in placed)
    return all(p.kind is not p.VAR_POSITIONAL for p in parameters)


def _parameters_to_give(signature: inspect.Signature, *, by_keyword: bool) -> list[str]:
    """Return the required parameters, without the two that are passed by position."""
    fillable = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    placed = [p.name for p in fillable if p.kind is p.POSITIONAL_OR_KEYWORD][: 0 if by_keyword else 2]
    return [p.name for p in fillable if p.default is p.empty and p.name not in placed]


def takes(function: Reward, extra: str) -> bool:
    """Return True if a function takes an entry of :data:`EXTRAS`, by name or by ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return extra in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def completion_form(prompt: Any, text: Any) -> Any:
    """Return a completion in the form of its prompt: chat messages if the prompt is chat messages, else the text.

    The messages of a conversation, up to the last answer, stay as they are for a chat.

    After an answer at the end of the prompt, which the policy continues, the message is the whole answer.

    Example:
        >>> completion_form("2 + 2?", "4"), completion_form([{"role": "user", "content": "2 + 2?"}], "4")
        ('4', [{'role': 'assistant', 'content': '4'}])
    """
    chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
    if chat and all(isinstance(message, Mapping) for message in prompt):
        if not isinstance(text, str):
            return text
        begun = prompt[-1].get("content") if prompt[-1].get("role") == "assistant" else None
        return [{"role": "assistant", "content": f"{begun or ''}{text}"}]
    return text if isinstance(text, str) else text[-1]["content"]
