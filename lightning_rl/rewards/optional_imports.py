"""Check for optional libraries, with the command that installs them."""

import importlib.util


def require(library: str, *, extra: str) -> None:
    """Check that a library is installed, without importing it.

    Raises:
        ImportError: If it is not installed; the message names the extra to install.
    """
    if importlib.util.find_spec(library) is None:
        raise ImportError(
            f"expected {library} to be installed, got no such module: pip install 'lightning-rl[{extra}]'"
        )
