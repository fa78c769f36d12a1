"""The command line of a recipe: keywords of its ``main`` as options, ``--tiny``, numbers that make no run refused."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jsonargparse import auto_cli

from lightning_rl.arguments import check_counts, check_numbers

MINIMUM = {"max_staleness": 0, "seed": 0, "warm_start": 0}  # of any other whole number: 1
TINY = "--tiny: a small model and rows made here, on a CPU and offline; options beside it have the last word"


def call(main: Callable[..., Any], small: Callable[[], Mapping[str, Any]] | None = None) -> Any:
    """Calls a recipe's ``main`` with the options of the command line, once every number is one that a run can have.

    Args:
        main: whose keywords are the options.
        small: the options that ``--tiny`` stands for; None for a recipe without.

    Returns:
        What ``main`` returns.

    Raises:
        SystemExit: naming an option whose number makes no run, before anything is built.
    """

    @wraps(main)
    def checked_main(**options: Any) -> Any:
        check(options)
        return main(**options)

    words = sys.argv[1:] if small is None else words_of(small)
    return auto_cli(checked_main, args=words, as_positional=False, epilog=None if small is None else TINY)


def words_of(small: Callable[[], Mapping[str, Any]]) -> list[str]:
    """The words of the command line, what ``--tiny`` stands for before all others, so that they have the last word."""
    words = [word for word in sys.argv[1:] if word != "--tiny"]
    options = small() if len(words) < len(sys.argv) - 1 else {}
    return [*(f"--{name}={value}" for name, value in options.items()), *words]


def check(options: Mapping[str, Any]) -> None:
    """Refuses counts below their minimum, and rates that are not above 0; jsonargparse takes none that is not finite.

    Lightning takes ``max_steps=-1`` for a run without end, and ``max_steps=0`` for one that is over.

    Raises:
        SystemExit: naming the option and its number.
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
