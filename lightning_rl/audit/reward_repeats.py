"""Replies: the values of reward functions that are asked again, on copies that share no state with the run.

A function is asked only if it is quick and everything that it holds can be copied.
"""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_rl.audit.copies import copy_apart
from lightning_rl.audit.outside import refuse_outside
from lightning_rl.rewards import RewardCall, SubprocessReward
from lightning_rl.rewards.reward_call import Rows
from lightning_rl.rewards.scoring import return_alone
from lightning_rl.rewards.values import values_of
from lightning_rl.utils.seeding import fork_generators, seed_everything

MIN_ROWS, MAX_ROWS = 4, 8  # rows of a call that some are left out of; rows that are asked about
MAX_SECONDS = 0.1  # seconds of a call in the run
MAX_PAIRS = 6  # rows that are asked about after the others
EARLY_TURNS, TURNS = (1, 2, 4, 8), 16  # audits in which rewards are asked again
CPU = torch.device("cpu")

Values = Sequence[float | None]


class RewardReply(NamedTuple):
    """Values of a few rows of one call of a reward function, in plain values.

    Attributes:
        name: Name of the function.
        reason: Reason for which it was not asked; empty if it was.
        rows: Rows of the call, in the order of the question.
        samples: Identities of these rows, as far as they are known.
        recorded: Values in the run.
        alone: Values without the other rows.
        repeated: Values together with the other rows in the order of the run; None if ``alone`` is as recorded.
        edited: Names of the arguments that it edited.
        after: Values of the same rows after a call about other rows, and after one about copies of themselves; None
            if the function does not repeat itself.
    """

    name: str
    reason: str = ""
    rows: Sequence[int] = ()
    samples: Sequence[int] = ()
    recorded: Values = ()
    alone: Values = ()
    repeated: Values | None = None
    edited: Sequence[str] = ()
    after: tuple[Values, Values] | None = None

    @property
    def own(self) -> bool:
        """True if the function repeats itself, so that other values come from another order or other neighbours."""
        return self.repeated is not None and equal_values(self.repeated, self.recorded)


class RewardWatch:
    """Asks the rewards of a run again, in its first audits and in every 16th.

    Args:
        functions: Functions by name, before their first call.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._fresh = {name: copy_apart(function) for name, function in functions.items()}
        self._turn, self._silent = 0, list[RewardReply]()

    def ask(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> list[RewardReply]:
        """Returns a reply for each function; between the audits that ask, those with a reason."""
        self._turn += 1
        if self._turn not in EARLY_TURNS and self._turn % TURNS:
            return self._silent
        latest = {call.name: (call, ids) for call, ids in zip(calls, samples, strict=True) if len(call.values) > 1}
        replies = [ask_again(call, ids, self._fresh.get(call.name)) for call, ids in latest.values()]
        self._silent = [reply for reply in replies if reply.reason]
        return replies


def ask_again(call: RewardCall, samples: Sequence[int], fresh: Any = None) -> RewardReply:
    """Asks copies of a reward function about a few rows of a call.

    Args:
        call: The call.
        samples: Identities of its rows, or nothing.
        fresh: The function before its first call, if it can be copied.
    """
    if reason := _silence_of(call):
        return RewardReply(call.name, reason)
    number = len(call.values)
    stride = 1 if number < MIN_ROWS else max(2, number // MAX_ROWS)  # without some of the others, if there are enough
    rows = list(range(number - 1, -1, -stride))[:MAX_ROWS]
    known = samples if len(samples) == number else []
    few, repeated = call.rows.select(rows), None
    try:
        with fork_generators(CPU), refuse_outside():
            edited = _edits(call, few)
            alone = [*_values(call, few)]
            after = _ask_after(call, few, fresh)
            for row in _ends(call):
                alone += _values(call, call.rows.select([row]))
                rows = [*rows, row]
            recorded = [call.values[row] for row in rows]
            if not equal_values(alone, recorded):
                everything = _values(call, call.rows)
                repeated = [everything[row] for row in rows]
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        return RewardReply(call.name, f"reward {call.name} could not be asked again: {type(error).__name__}: {error}")
    return RewardReply(
        call.name, "", rows, [known[row] for row in rows] if known else [], recorded, alone, repeated, edited, after
    )


def equal_values(ours: Values, theirs: Values) -> bool:
    """Returns True if two lists of rewards are the same up to rounding."""
    return len(ours) == len(theirs) and all(map(same_value, ours, theirs))


def same_value(value: float | None, other: float | None) -> bool:
    """Returns True if two rewards are the same up to rounding."""
    if value is None or other is None:
        return value is other
    return bool(torch.isclose(torch.tensor(float(value)), torch.tensor(float(other)), equal_nan=True))


def _silence_of(call: RewardCall) -> str:
    """Returns the reason for which a function is not asked again; empty if there is none."""
    function: Any = call.function
    coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    cases = {
        "its function is not at hand": function is None,
        f"reward {call.name} runs in processes of its own": isinstance(function, SubprocessReward),
        f"reward {call.name} is a coroutine": coroutine,
        f"a call of reward {call.name} takes more than {MAX_SECONDS} s": call.seconds > MAX_SECONDS,
        f"reward {call.name} failed on some rows": bool(call.failures),
    }
    reason, begin = next((reason for reason, holds in cases.items() if holds), ""), time.perf_counter()
    if not reason and copy_apart(function) is None:
        reason = f"reward {call.name} holds state that cannot be copied"
    if not reason and time.perf_counter() - begin > MAX_SECONDS:
        reason = f"a copy of reward {call.name} takes more than {MAX_SECONDS} s"
    return f"{reason}: lightning_rl.testing.check_reward asks it" if reason else ""


def _ends(call: RewardCall) -> list[int]:
    """Returns the shortest and the longest row of a call, if they differ."""
    lengths = [len(ids) for ids in call.completion_ids]
    ends = [lengths.index(min(lengths)), lengths.index(max(lengths))]
    return ends if lengths[ends[0]] < lengths[ends[1]] else []


def _ask_after(call: RewardCall, rows: Rows, fresh: Any) -> tuple[Values, Values] | None:
    """Returns values of some rows after two different calls, which differ if the function remembers what it scored."""
    if getattr(call.function, "remembers", False):
        return None
    first = call if fresh is None else call._replace(function=fresh)
    replies = [
        _ask_together(call, _other_prompts(rows)),
        _ask_one_by_one(first, rows),
        _ask_one_by_one(call, _of_equal_length(rows, max(map(len, call.completion_ids)))),
    ]
    differing = (reply for reply in replies if reply is not None and not equal_values(*reply))
    return next(differing, replies[0])


def _ask_together(call: RewardCall, rows: Rows) -> tuple[Values, Values] | None:
    """Returns values of all rows after a call with answers of other rows, and after one with longer answers.

    Longer answers may take more of a function's noise: one that is noisy gets the same answers in reverse order
    instead. Returns None if the function does not repeat itself.
    """
    turned, longer = _turn(rows, 1), _turn(rows, 2, times=2)
    if len({str(value) for value in _values(call, rows.select([0] * len(rows)))}) > 1:
        longer = turned.select(range(len(rows))[::-1])
    after_turned, after_longer, again = (_values(call, before, rows) for before in (turned, longer, turned))
    return (after_turned, after_longer) if equal_values(after_turned, again) else None


def _turn(rows: Rows, places: int, *, times: int = 1) -> Rows:
    """Returns the rows with the answers of others, each a number of times."""
    order = [(row + places) % len(rows) for row in range(len(rows))]
    answers = [rows.completions[row] for row in order]
    answers = [answer * times if isinstance(answer, str) else answer for answer in answers]
    return replace(rows, completions=answers, completion_ids=[list(rows.completion_ids[row]) * times for row in order])


def _ask_one_by_one(call: RewardCall, rows: Rows) -> tuple[Values, Values] | None:
    """Returns values of single rows after a call about the others, and after one about copies of themselves.

    Both calls have the same number of rows and begin from the same generators, so that neither noise nor a curriculum
    makes a difference. Returns None if the function does not repeat itself.
    """
    number, after_others, after_itself = len(rows), list[float | None](), list[float | None]()
    for row in range(min(number, MAX_PAIRS)):
        itself, alone = rows.select([row] * (number - 1)), rows.select([row])
        if len({str(value) for value in _values(call, itself)}) > 1:
            return None
        others = rows.select([other for other in range(number) if other != row])
        after_others += _values(call, others, alone)
        after_itself += _values(call, itself, alone)
    return after_others, after_itself


def _of_equal_length(rows: Rows, longest: int) -> Rows:
    """Returns different answers to one prompt, all of a length that no answer has had."""
    length = 2 * longest + 1
    texts = [text for text in rows.completions if isinstance(text, str)]
    characters = 2 * max(map(len, texts), default=0) + 1
    completions = [_cut(text, characters) if isinstance(text, str) else text for text in rows.completions]
    ids = [_cut(list(row), length) for row in rows.completion_ids]
    return replace(_other_prompts(rows.select([0] * len(rows))), completions=completions, completion_ids=ids)


def _cut(part: Any, length: int) -> Any:
    """Returns a text or list, repeated up to a length."""
    return (part * (length // max(len(part), 1) + 1))[:length]


def _values(call: RewardCall, *batches: Rows) -> Values:
    """Returns the values of the last of several calls of a copy of the function."""
    twin: Any = copy_apart(call.function)
    return [_ask(call.name, twin, rows) for rows in batches][-1]


def _ask(name: str, function: Any, rows: Rows) -> Values:
    seed_everything(0, CPU)
    return values_of(return_alone(name, function, rows.copy()), len(rows))


def _edits(call: RewardCall, rows: Rows) -> list[str]:
    """Returns the names of the arguments that the function edits."""
    given = rows.copy()
    seed_everything(0, CPU)
    return_alone(call.name, copy_apart(call.function), given)
    return rows.edits(given)


def _other_prompts(rows: Rows) -> Rows:
    """Returns the rows with prompts that no call had, as far as their form is known."""
    return replace(rows, prompts=[_other_prompt(prompt) for prompt in rows.prompts])


def _other_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt + " "
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(token, int) for token in prompt):
        return [*prompt, prompt[-1]]
    if (
        isinstance(prompt, list)
        and prompt
        and isinstance(prompt[-1], dict)
        and isinstance(prompt[-1].get("content"), str)
    ):
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + " "}]
    return prompt
