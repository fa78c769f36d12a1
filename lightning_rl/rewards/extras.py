"""Optional libraries: found before they are needed, with the command that installs them."""

import importlib.util


def require(library: str, *, extra: str) -> None:
    """Checks that a library is installed, without importing it.

    Raises:
        ImportError: if it is not; the message names the extra that brings it.
    """
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"expected {library} to be installed, which it is not: pip install 'lightning-rl[{extra}]'")
