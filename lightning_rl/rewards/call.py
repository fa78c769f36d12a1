"""Call: what a reward function is given, what it may note beside its values, and what is kept of a call.

Source: the contract of ``reward_funcs`` in TRL's GRPOTrainer, so that functions written for it run unchanged.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import TrainerState

from lightning_rl.edits import changed_entries, copy_plain
from lightning_rl.naming import REWARD_ARGUMENTS, in_words

Reward = Callable[..., Any]
"""``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, or a coroutine of one; None: it
does not apply to the row.
"""

EXTRAS = ("trainer_state", "log_extra", "log_metric")


class Failure(NamedTuple):
    """Rows that a reward function failed to score.

    Attributes:
        rows: their numbers within the call.
        cause: what went wrong, as the end of the sentence "reward x ...".
        traceback: where it was raised; empty if it was returned.
    """

    rows: tuple[int, ...]
    cause: str
    traceback: str = ""


class RewardCall(NamedTuple):
    """One call of one reward function; what is not plain is left out of saved files.

    Attributes:
        name: of the function.
        completion_ids: as it was given them.
        values: what it gave for each row: a number, None if it does not apply, NaN if it failed.
        seconds: how long it took.
        prompts: as it was given them.
        completions: as it was given them.
        columns: as it was given them.
        function: itself.
        failures: the rows without a value, by cause.
        extras: columns that it noted with ``log_extra``.
        metrics: numbers that it noted with ``log_metric``.
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
        """What it was about."""
        return Rows(
            prompts=self.prompts, completions=self.completions, completion_ids=self.completion_ids, columns=self.columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples as a reward function sees them.

    Args:
        prompts: as the data gave them.
        completions: chat messages for a prompt of chat messages, else text.
        completion_ids: the tokens of each completion.
        columns: whatever else the data holds, a value for each row.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        """How many rows."""
        return len(self.prompts)

    def copy(self) -> "Rows":
        """The same in containers of their own, however deep, so that no function edits what another one is given."""
        ids = [list(row) for row in self.completion_ids]
        values = copy_plain([self.prompts, self.completions, dict(self.columns)])
        return Rows(prompts=values[0], completions=values[1], completion_ids=ids, columns=values[2])

    def edits(self, given: "Rows") -> list[str]:
        """The names of the arguments that a function edited in its own copy of these rows."""
        before, after = (
            {"prompts": rows.prompts, "completions": rows.completions, "completion_ids": rows.completion_ids}
            for rows in (self, given)
        )
        return changed_entries({**before, **self.columns}, {**after, **given.columns})

    def select(self, rows: Sequence[int]) -> "Rows":
        """Some of the rows, in the order given, in lists of their own."""
        return Rows(
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            completion_ids=[self.completion_ids[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
        )


@dataclass(slots=True)
class Notes:
    """What one call notes beside its values.

    Attributes:
        number: of the rows of the call.
        extras: columns, a value for each row.
        metrics: every number under its name, in the order noted.
    """

    number: int
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keeps a column with the samples.

        Raises:
            ValueError: if there is not a value for each row.
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
    """How one function wants to be called.

    Args:
        by_keyword: whether ``prompts`` and ``completions`` go by their names, as in TRL, or by their place.
        extras: which of :data:`EXTRAS` it takes.
    """

    by_keyword: bool = False
    extras: frozenset[str] = frozenset()

    @staticmethod
    def of(name: str, function: Reward, columns: Sequence[str]) -> "CallStyle":
        """The style that a function's signature asks for.

        One that names any of what there is gets everything by keyword, so that nothing is ever taken for something
        else; one whose first two parameters have names of their own gets prompts and completions by their place.

        Raises:
            TypeError: if it cannot be called like a reward, which no row is to blame for.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some built-in functions have none
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
                    f", which needs {in_words(missing)}: name what there is, or rename a column of the data, as in "
                    f'PromptDataModule(columns={{"{missing[0]}": ...}})'
                )
            )
            raise TypeError(
                f"expected reward {name} to accept (prompts, completions, *, completion_ids, **columns) with the "
                f"columns {sorted(columns)}, got {name}{signature}{cure}"
            ) from error
        return CallStyle(by_keyword=by_keyword, extras=extras)

    def call(self, function: Reward, rows: Rows, notes: Notes, state: TrainerState | None = None) -> Any:
        """Calls the function: what it returned, which may be something to await."""
        extras = {
            "trainer_state": state or TrainerState(),
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
        }
        keywords = {"completion_ids": rows.completion_ids, **rows.columns}
        keywords |= {name: value for name, value in extras.items() if name in self.extras}
        if self.by_keyword:
            return function(prompts=rows.prompts, completions=rows.completions, **keywords)
        return function(rows.prompts, rows.completions, **keywords)


def _names_any(signature: inspect.Signature, known: Collection[str]) -> bool:
    """Whether parameters that have a place also have a known name, or none has a place."""
    parameters = signature.parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return False
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if placed:
        return any(name in known for name in placed)
    return all(p.kind is not p.VAR_POSITIONAL for p in parameters)


def _parameters_to_give(signature: inspect.Signature, *, by_keyword: bool) -> list[str]:
    """Parameters that have to be given, without the two that are filled by their place."""
    fillable = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    placed = [p.name for p in fillable if p.kind is p.POSITIONAL_OR_KEYWORD][: 0 if by_keyword else 2]
    return [p.name for p in fillable if p.default is p.empty and p.name not in placed]


def takes(function: Reward, extra: str) -> bool:
    """Whether a function takes one of :data:`EXTRAS`, by name or as one of any keywords."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return False
    return extra in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def completion_form(prompt: Any, text: str) -> Any:
    """A completion in the form of its prompt: chat messages for chat messages, else the text itself.

    Example:
        >>> completion_form("2 + 2?", "4"), completion_form([{"role": "user", "content": "2 + 2?"}], "4")
        ('4', [{'role': 'assistant', 'content': '4'}])
    """
    chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
    if chat and all(isinstance(message, Mapping) for message in prompt):
        return [{"role": "assistant", "content": text}]
    return text
