"""Checks of :mod:`lightning_rl.run_checks`, one at a time."""

from collections.abc import Callable
from typing import Any

from kit.support import tiny_module
from lightning_rl import FakeEngine, RLCallback
from lightning_rl.corrections import Corrections
from lightning_rl.options import Options
from lightning_rl.run_checks import Problems


def options_of(**given: Any) -> Options:
    """Options of a run with an engine that can do everything, and with groups of two."""
    given = {name: value for name, value in given.items() if value is not None}
    return tiny_module(**{"engine": FakeEngine(lambda _: []), "group_size": 2, **given}).options


def check(check: Callable[[Options, Corrections], Problems], *callbacks: RLCallback, **given: Any) -> None:
    """Raise ValueError with the problems that a check finds."""
    refuse(check(options_of(**given), Corrections(callbacks)))


def refuse(problems: Problems) -> None:
    """Raise ValueError with the problems, if there are any."""
    if lines := list(problems):
        raise ValueError("\n".join(lines))
