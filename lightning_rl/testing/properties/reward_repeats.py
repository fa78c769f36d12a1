"""Repeated calls of a reward function: with other rows of a call, in other orders, and after calls about other rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_rl.rewards import RewardCall
from lightning_rl.rewards.submitted import return_alone
from lightning_rl.rewards.values import values_of
from lightning_rl.samples import Rows
from lightning_rl.utils.seeding import fork_generators, seed_everything

MIXED_ROWS = 2  # rows scored with single arguments of other rows
SEED = 1_234_577  # of repeated calls; a run seeded with 0 would draw the noise of its first call again
CPU = torch.device("cpu")

Make = Callable[[], Any]
"""Function that returns the reward function to call: itself, or a copy that shares no state."""


class RepeatedCall(NamedTuple):
    """Comparison of a call of a reward function with repeated ones.

    Attributes:
        rows: Rows of the call whose value differs when they are scored in other orders or with fewer rows.
        repeats: True if the whole call, repeated, returns the values of the call.
        edited: Names of the arguments that the function edits.
    """

    rows: Sequence[int] = ()
    repeats: bool = True
    edited: Sequence[str] = ()


def same_value(value: float | None, other: float | None) -> bool:
    """Return True if two rewards are equal up to rounding."""
    if value is None or other is None:
        return value is other
    return bool(torch.isclose(torch.tensor(float(value)), torch.tensor(float(other)), equal_nan=True))


def repeat_call(call: RewardCall, orders: Sequence[Sequence[int]], make: Make) -> RepeatedCall:
    """Call a reward function with the rows of each order, and with all rows if a value differs.

    The state of the global generators is the same in every call, and that of before on return.
    """
    moved, edited = set[int](), set[str]()
    with fork_generators(CPU):
        for rows in orders:
            values, edits = _call(call.name, make(), call.rows.select(rows))
            edited.update(edits)
            moved |= {row for row, value in zip(rows, values, strict=True) if not same_value(value, call.values[row])}
        everything = _call(call.name, make(), call.rows)[0] if moved else call.values
    compared = {row for rows in orders for row in rows}
    repeats = all(same_value(everything[row], call.values[row]) for row in compared)
    return RepeatedCall(sorted(moved), repeats, sorted(edited))


def remembers_rows(name: str, rows: Rows, make: Make) -> bool | None:
    """Return True if earlier calls about other rows change the value of a row; None if it changes between equal rows.

    Copies of single rows are scored after a call with related answers, and after one with the same copies. All calls
    have the same number of rows and generator state, so noise and curricula make no difference.
    """
    with fork_generators(CPU):
        for row in range(len(rows)):
            for place, related in enumerate(_neighbors(rows, row)):
                itself, after = rows.select([row] * len(related)), list[Sequence[float | None]]()
                with suppress(*[Exception, SystemExit] if place else []):  # it may refuse columns that do not fit
                    for before in (related, itself):
                        twin = make()
                        first = _call(name, twin, before)[0]
                        after.append(_call(name, twin, itself)[0])
                    if len({str(value) for value in first}) > 1:  # of copies of one row
                        return None
                    if not all(map(same_value, *after)):
                        return True
    return False


def _neighbors(rows: Rows, row: int) -> Iterator[Rows]:
    """Yield rows that share some arguments with this row, so a memo keyed by these stores another value for it.

    They are the other rows with their answers to the prompt of this row, as they are and with its length; its answer to
    the prompts of the others; and its arguments with one of another row.
    """
    others = sorted(
        (other for other in range(len(rows)) if other != row),
        key=lambda other: repr(rows.prompts[other]) == repr(rows.prompts[row]),
    )
    if not others:
        return
    theirs, same, length = rows.select(others), rows.select([row] * len(others)), len(rows.completion_ids[row])
    answers = replace(same, completions=theirs.completions, completion_ids=theirs.completion_ids)
    ids = [(list(one) * (length // max(len(one), 1) + 1))[:length] for one in theirs.completion_ids]
    asked = replace(theirs, completions=same.completions, completion_ids=same.completion_ids)
    yield _join(theirs, answers, replace(answers, completion_ids=ids), asked)
    changes = {"prompts": theirs.prompts, **theirs.columns} if row < MIXED_ROWS else {}
    for name, values in changes.items():
        own = repr(rows.prompts[row] if name == "prompts" else rows.columns[name][row])
        ordered = sorted(values, key=lambda value: repr(value) == own)  # a memo may keep the first value
        if name == "prompts":
            yield replace(same, prompts=ordered)
        elif repr(ordered[0]) != own:
            yield replace(same, columns={**same.columns, name: ordered})


def _join(*parts: Rows) -> Rows:
    return Rows(
        prompts=[one for part in parts for one in part.prompts],
        completions=[one for part in parts for one in part.completions],
        completion_ids=[one for part in parts for one in part.completion_ids],
        columns={name: [one for part in parts for one in part.columns[name]] for name in parts[0].columns},
    )


def _call(name: str, function: Any, rows: Rows) -> tuple[Sequence[float | None], list[str]]:
    """Return the values of some rows and the names of the arguments that the function edits."""
    given = rows.copy()
    seed_everything(SEED, CPU)
    values = values_of(return_alone(name, function, given), len(rows))
    return values, rows.edits(given)
