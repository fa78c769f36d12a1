"""Checkouts: ``lightning_rl/callbacks`` is a link, of which git may have made a text file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

PACKAGE = "lightning_rl.callbacks"


class BrokenLink:
    """Asked when nothing else finds the package: says what is wrong, and does not call it missing."""

    def __init__(self, link: Path) -> None:
        self.link = link

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raises an ImportError for the package; everything else it does not know.

        Raises:
            ImportError: saying how to get a link, or to do without.
        """
        del path, target
        if name == PACKAGE:
            self._refuse()

    def _refuse(self) -> NoReturn:
        state = "a text file" if self.link.is_file() else "nothing"
        raise ImportError(
            f"expected {self.link} to be a link to ../callbacks, got {state}: git may make no links (Windows without "
            "developer mode), and archives hold none. Install the checkout (pip install -e .), or check it out after "
            "git config core.symlinks true",
            name=PACKAGE,
        )


def watch_link(package: Path) -> None:
    """Has an import of the callbacks explained, if the link in a package's folder is none."""
    link = package / "callbacks"
    if not link.is_dir() and not any(isinstance(finder, BrokenLink) for finder in sys.meta_path):
        sys.meta_path.append(BrokenLink(link))
