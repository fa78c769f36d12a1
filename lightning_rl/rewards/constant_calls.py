"""Text about reward functions that return one constant, with a call that shows the types of their arguments."""

import math
from collections.abc import Sequence
from typing import Any

from lightning_rl.rewards.scoring import may_read
from lightning_rl.samples import RewardCall
from lightning_rl.utils.terminal import visible

SHOWN = 80  # characters of a value


def describe_constant_calls(calls: Sequence[RewardCall]) -> str:
    """Return one call of each reward function, with type and value of what it reads, if all returned one constant each.

    Args:
        calls: Calls of one rollout.

    Returns:
        Text such as ``exact(completion='4' (str), answer=4 (int)) = 0``; empty if the values of a function differ.
    """
    first: dict[str, tuple[RewardCall, int, float]] = {}
    for call in calls:
        for row, value in enumerate(call.values):
            if (
                value is not None
                and math.isfinite(value)
                and first.setdefault(call.name, (call, row, value))[2] != value
            ):
                return ""
    return "; ".join(_text(*one) for one in first.values())


def _text(call: RewardCall, row: int, value: float) -> str:
    read = [name for name in call.columns if call.function is None or may_read(call.function, name)]
    arguments = {"completion": call.completions[row], **{name: call.columns[name][row] for name in read}}
    return f"{call.name}({', '.join(f'{name}={_value_text(one)}' for name, one in arguments.items())}) = {value:g}"


def _value_text(value: Any) -> str:
    return f"{visible(repr(value))[:SHOWN]} ({type(value).__name__})"
