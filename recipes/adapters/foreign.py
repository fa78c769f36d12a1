"""Foreign: what adapters share: a package is loaded when it is needed, and its names are checked."""

import difflib
import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_rl.rewards.optional_imports import require


def load(library: str, *, extra: str) -> Any:
    """Import an optional library, and restore the logging of this process after its import.

    Raises:
        ImportError: if it is not installed; the message names the extra that brings it.
    """
    require(library.partition(".")[0], extra=extra)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return importlib.import_module(library)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def check_name(name: Any, known: Iterable[str], *, option: str, library: str) -> None:
    """Refuses a name that a library does not know.

    Raises:
        ValueError: naming it, and the nearest of those that the library knows.
    """
    names = list(known)
    if isinstance(name, str) and name in names:
        return
    inside = [one for one in names if str(name).casefold() in one.casefold()] if name else []
    near = inside[:3] or difflib.get_close_matches(str(name), names, 3)
    cure = f"write {' or '.join(map(repr, near))}" if near else f"look among the {len(names)} that it has"
    raise ValueError(f"expected {option} to be a name that {library} knows, got {name!r:.200}: {cure}")


def check_options(**options: Any) -> None:
    """Refuses arguments that are no mapping from names to values, or None.

    Raises:
        ValueError: naming the argument and the value.
    """
    for name, value in options.items():
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise ValueError(f"expected {name} to map names of options to values, got {value!r:.200}")
