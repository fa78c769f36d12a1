"""Values of the rows of a reward call, called again with other rows."""

from collections.abc import Sequence
from math import nan

import torch

from lightning_rl.rewards import RewardCall
from lightning_rl.rewards.submitted import return_alone
from lightning_rl.rewards.values import values_of


def same_value(value: float | None, other: float | None) -> bool:
    """Return True if two rewards are equal up to rounding."""
    if value is None or other is None:
        return value is other
    return bool(torch.isclose(torch.tensor(float(value)), torch.tensor(float(other)), equal_nan=True))


def rows_valued_otherwise(call: RewardCall, rows: Sequence[int]) -> list[int]:
    """Return the rows whose values differ when the function is called with ``rows`` only, in that order."""
    if call.function is None:
        return []
    try:
        values = values_of(return_alone(call.name, call.function, call.rows.select(rows).copy()), len(rows))
    except (Exception, SystemExit):  # noqa: BLE001  user code
        values = [nan] * len(rows)
    return [row for row, value in zip(rows, values, strict=True) if not same_value(value, call.values[row])]
