"""Record of a call of a reward function: its arguments, values and failures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_rl.samples.failure import Failure
from lightning_rl.utils.mutation_guard import changed_entries, copy_plain


class RewardCall(NamedTuple):
    """Record of one call of one reward function: "exact_match" on 2 rows, values [1.0, None], 0.1 seconds.

    Saved files leave out values that are not plain data.

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
    """Samples in the form that reward functions take: prompts ["2 + 3?"], completions ["5"], columns {"answer": ["5"]}.

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
