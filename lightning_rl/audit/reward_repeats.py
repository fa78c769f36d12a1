"""Reward functions called again, on copies that share no state with the run.

Only functions that are quick and can be copied are called again.
"""

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_rl.audit.outside import refuse_outside
from lightning_rl.audit.schedule import calls_again
from lightning_rl.rewards import RewardCall, SubprocessReward
from lightning_rl.rewards.submitted import return_alone
from lightning_rl.rewards.values import values_of
from lightning_rl.samples import Rows
from lightning_rl.testing.properties.copies import copy_apart
from lightning_rl.testing.properties.reward_rows import same_value
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.seeding import fork_generators, seed_everything

MIN_ROWS, MAX_ROWS, MAX_PAIRS = 4, 8, 4  # rows of a call that is thinned out; rows scored together; rows scored alone
MIXED_ROWS = 2  # rows scored with single arguments of other rows
MAX_SECONDS = 0.1  # duration of a call in the run
SEED = 1_234_577  # of repeated calls; a run seeded with 0 would draw the noise of its first call again
CPU = torch.device("cpu")

Values = Sequence[float | None]


class RewardReply(NamedTuple):
    """Comparison of repeated calls of one reward function, in plain values.

    Attributes:
        name: Name of the function.
        reason: Reason why it was not called again; empty if it was.
        rows: Rows of the call whose value differs when they are scored with fewer rows.
        samples: Ids of the samples in these rows, or of all compared rows; empty if unknown.
        repeats: True if the whole call, repeated, returns the values of the run.
        edited: Names of the arguments that the function edits.
        remembers: True if earlier calls change a value; None if the function is noisy or remembers on purpose.
    """

    name: str
    reason: str = ""
    rows: Sequence[int] = ()
    samples: Sequence[int] = ()
    repeats: bool = True
    edited: Sequence[str] = ()
    remembers: bool | None = False


class RewardWatch:
    """Repeats calls of a run's reward functions, see :func:`calls_again`.

    Args:
        functions: Functions by name, before their first call.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._fresh = {name: copy_apart(function) for name, function in functions.items()}
        self._audit, self._silent = 0, list[RewardReply]()

    def ask(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> list[RewardReply]:
        """Return one reply per function; in audits that repeat nothing, the replies with a reason."""
        self._audit += 1
        if not calls_again(self._audit):
            return self._silent
        latest = {call.name: (call, ids) for call, ids in zip(calls, samples, strict=True) if len(call.values) > 1}
        replies = [ask_again(call, ids, self._fresh.get(call.name)) for call, ids in latest.values()]
        self._silent = [reply for reply in replies if reply.reason]
        return replies


def ask_again(call: RewardCall, samples: Sequence[int], fresh: Any = None) -> RewardReply:
    """Call copies of a reward function with a few rows of a call.

    Args:
        call: Call of the run.
        samples: Ids of its rows, or nothing.
        fresh: Copy of the function before its first call; by default the function itself.
    """
    if reason := _reason_to_skip(call):
        return RewardReply(call.name, reason)
    number, lengths = len(call.values), [len(ids) for ids in call.completion_ids]
    stride = 1 if number < MIN_ROWS else max(2, number // MAX_ROWS)  # leaves out some of the other rows
    few = list(range(number - 1, -1, -stride))[:MAX_ROWS]
    ends = [lengths.index(length) for length in (min(lengths), max(lengths))]
    values, edited = dict[int, list[float | None]](), set[str]()
    try:
        with fork_generators(CPU), refuse_outside():
            for rows in (few, *([row] for row in ends)):
                again, edits = _call(call.name, copy_apart(call.function), call.rows.select(rows))
                edited.update(edits)
                for row, value in zip(rows, again, strict=True):
                    values.setdefault(row, []).append(value)
            moved = [row for row in values if not all(same_value(value, call.values[row]) for value in values[row])]
            everything = _call(call.name, copy_apart(call.function), call.rows)[0] if moved else call.values
            best = max(range(number), key=lambda row: call.values[row] or 0.0)  # most rows of a sparse reward have a 0
            pairs = list(dict.fromkeys([best, *few[::2], *few[1::2]]))[:MAX_PAIRS]  # few[::2] spans the prompts
            remembers = _remembers(call, call.rows.select(pairs), fresh or call.function)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        reason = hide_secrets(f"{type(error).__name__}: {error}")
        return RewardReply(call.name, f"reward {call.name} could not be called again: {reason}")
    known = [samples[row] for row in moved or few] if len(samples) == number else []
    repeats = all(same_value(everything[row], call.values[row]) for row in values)
    return RewardReply(call.name, "", moved, known, repeats, sorted(edited), remembers)


def _reason_to_skip(call: RewardCall) -> str:
    function: Any = call.function
    coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    cases = {
        "its function is unavailable": function is None,
        f"reward {call.name} runs in processes": isinstance(function, SubprocessReward),
        f"reward {call.name} is a coroutine": coroutine,
        f"a call of reward {call.name} takes more than {MAX_SECONDS} s": call.seconds > MAX_SECONDS,
        f"reward {call.name} failed on some rows": bool(call.failures),
    }
    reason, begin = next((reason for reason, holds in cases.items() if holds), ""), time.perf_counter()
    if not reason and copy_apart(function) is None:
        reason = f"reward {call.name} holds state that cannot be copied"
    if not reason and time.perf_counter() - begin > MAX_SECONDS:
        reason = f"a copy of reward {call.name} takes more than {MAX_SECONDS} s"
    return f"{reason}: test it with lightning_rl.testing.check_reward" if reason else ""


def _remembers(call: RewardCall, rows: Rows, function: Any) -> bool | None:
    """Score copies of single rows after a call with related answers, and after one with the same copies.

    All calls have the same number of rows and generator state, so noise and curricula make no difference.
    """
    if getattr(call.function, "remembers", False):
        return None
    for row in range(len(rows)):
        for place, related in enumerate(_neighbors(rows, row)):
            itself, after = rows.select([row] * len(related)), list[Values]()
            with suppress(*[Exception, SystemExit] if place else []):  # it may refuse columns that do not fit together
                for before in (related, itself):
                    twin = copy_apart(function)
                    first = _call(call.name, twin, before)[0]
                    after.append(_call(call.name, twin, itself)[0])
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


def _call(name: str, function: Any, rows: Rows) -> tuple[Values, list[str]]:
    """Return the values of some rows and the names of the arguments that the function edits."""
    given = rows.copy()
    seed_everything(SEED, CPU)
    values = values_of(return_alone(name, function, given), len(rows))
    return values, rows.edits(given)
