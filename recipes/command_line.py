"""Command line of a recipe: keywords of ``main`` as options, ``--tiny``, and checks of numbers."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jsonargparse import auto_cli

from lightning_rl.utils.arguments import check_counts, check_numbers

MINIMUM = {"max_staleness": 0, "seed": 0, "warm_start": 0}  # 1 for any other integer
TINY = "--tiny: use a small model and small data, on a CPU and offline; other options override its settings"


def call(main: Callable[..., Any], small: Callable[[], Mapping[str, Any]] | None = None) -> Any:
    """Call a recipe's ``main`` with the options of the command line, after a check of their numbers.

    Args:
        main: Function whose keywords are the options.
        small: Returns the options of ``--tiny``; None for a recipe without.

    Returns:
        Result of ``main``.

    Raises:
        SystemExit: With an option whose number is invalid, before anything is built.
    """

    @wraps(main)
    def checked_main(**options: Any) -> Any:
        check(options)
        return main(**options)

    words = sys.argv[1:] if small is None else words_of(small)
    return auto_cli(checked_main, args=words, as_positional=False, epilog=None if small is None else TINY)


def words_of(small: Callable[[], Mapping[str, Any]]) -> list[str]:
    """Return the arguments of the command line after those of ``--tiny``, which they override."""
    words = [word for word in sys.argv[1:] if word != "--tiny"]
    options = small() if len(words) < len(sys.argv) - 1 else {}
    return [*(f"--{name}={value}" for name, value in options.items()), *words]


def check(options: Mapping[str, Any]) -> None:
    """Check that counts have their minimum and rates are above 0.

    Lightning accepts ``max_steps=-1`` for no limit and ``max_steps=0`` for no step.

    Raises:
        SystemExit: With the option and its number.
    """
    every_device = {"devices": -1} if options.get("accelerator") != "cpu" else {}
    try:
        for name, value in options.items():
            named: dict[str, Any] = {f"--{name}": value}
            if isinstance(value, float):
                check_numbers(above=0, **named)
            elif isinstance(value, int) and not isinstance(value, bool) and value != every_device.get(name):
                check_counts(MINIMUM.get(name, 1), **named)
    except ValueError as refused:
        raise SystemExit(str(refused)) from None
