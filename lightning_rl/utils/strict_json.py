"""Parser of JSON from other programs."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as its standard has it.

    Args:
        text: Text of one value.

    Raises:
        ValueError: If it is not JSON, has NaN or Infinity, or is nested too deeply.

    Example:
        >>> parse_json("[1, 2]")
        [1, 2]
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("expected JSON that is less deeply nested") from None


def _refuse(name: str) -> None:
    raise ValueError(f"expected JSON, got {name}")
