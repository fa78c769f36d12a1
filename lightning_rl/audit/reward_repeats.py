"""Reward functions called again, on copies that share no state with the run.

Only functions that are quick and can be copied are called again.
"""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_rl.audit.outside import refuse_outside
from lightning_rl.audit.schedule import calls_again
from lightning_rl.rewards import RewardCall, SubprocessReward
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.testing.properties.copies import copy_apart
from lightning_rl.testing.properties.reward_repeats import remembers_rows, repeat_call
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.keys import hide_secrets

MIN_ROWS, MAX_ROWS, MAX_PAIRS = 4, 8, 4  # rows of a call that is thinned out; rows scored together; rows scored alone
MAX_SECONDS = 0.1  # duration of a call in the run


CHECKS = ("reward_order", "reward_memory", "reward_inputs")
RewardReply = Mapping[str, Finding | Skip]
"""Results of the repeated calls of one function by name of the check."""


class RewardWatch:
    """Repeats calls of a run's reward functions, see :func:`calls_again`.

    Args:
        functions: Functions by name, before their first call.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._fresh = {name: copy_apart(function) for name, function in functions.items()}
        self._audit, self._silent = 0, list[RewardReply]()

    def ask(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> list[RewardReply]:
        """Return one reply per function; in audits that repeat nothing, those without calls."""
        self._audit += 1
        if not calls_again(self._audit):
            return self._silent
        latest = {call.name: (call, ids) for call, ids in zip(calls, samples, strict=True) if len(call.values) > 1}
        replies = [ask_again(call, ids, self._fresh.get(call.name)) for call, ids in latest.values()]
        self._silent = [reply for reply in replies if isinstance(reply.get("reward_inputs"), Skip)]
        return replies


def ask_again(call: RewardCall, samples: Sequence[int], fresh: Any = None) -> RewardReply:
    """Call copies of a reward function with a few rows of a call.

    Args:
        call: Call of the run.
        samples: Ids of its rows, or nothing.
        fresh: Copy of the function before its first call; by default the function itself.
    """
    if reason := _reason_to_skip(call):
        return dict.fromkeys(CHECKS, Skip(reason))
    number, lengths = len(call.values), [len(ids) for ids in call.completion_ids]
    stride = 1 if number < MIN_ROWS else max(2, number // MAX_ROWS)  # leaves out some of the other rows
    few = list(range(number - 1, -1, -stride))[:MAX_ROWS]
    ends = [lengths.index(length) for length in (min(lengths), max(lengths))]
    best = max(range(number), key=lambda row: call.values[row] or 0.0)  # most rows of a sparse reward have a 0
    pairs = list(dict.fromkeys([best, *few[::2], *few[1::2]]))[:MAX_PAIRS]  # few[::2] spans the prompts
    remembers = None
    try:
        with refuse_outside():
            repeated = repeat_call(call, [few, *([row] for row in ends)], partial(copy_apart, call.function))
            if not getattr(call.function, "remembers", False):
                make = partial(copy_apart, fresh or call.function)
                remembers = remembers_rows(call.name, call.rows.select(pairs), make)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        reason = hide_secrets(f"{type(error).__name__}: {error}")
        return dict.fromkeys(CHECKS, Skip(f"reward {call.name} could not be called again: {reason}"))
    known = [samples[row] for row in repeated.rows or few] if len(samples) == number else []
    found, reply = Finding(culprit=f"reward {call.name}", samples=known[:4]), dict[str, Finding | Skip]()
    if not repeated.repeats:
        reply["reward_order"] = Skip(f"reward {call.name} is not repeatable")
    elif repeated.rows:
        observed = f"other values for rows {repeated.rows[:4]} of a call with fewer rows, in reverse order"
        reply["reward_order"] = replace(found, observed=observed)
    if remembers is None:
        reply["reward_memory"] = Skip(f"reward {call.name} is not repeatable, or remembers on purpose")
    elif remembers:
        reply["reward_memory"] = found
    if repeated.edited:
        reply["reward_inputs"] = replace(found, observed=f"edits of {', '.join(repeated.edited)}")
    return reply


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
