"""Writes the licence of every installed package as a table.

python tests/licences.py > docs/licences.md
"""

import re
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

HEAD = """# Licences

Of every package that `make install` puts into `.venv`, as its metadata says, written by `make licences`. The library
itself is Apache-2.0 and carries none of them.

| package | licence |
|---|---|
"""


def licence(distribution: Distribution) -> str:
    """What a package says of its licence: an SPDX expression, else its classifiers, else the first line of a text."""
    data: Any = distribution.metadata
    named = [line.rpartition(" :: ")[2] for line in data.get_all("Classifier") or [] if line.startswith("License ::")]
    texts = [data.get("License-Expression"), " and ".join(named), (data.get("License") or "").strip().split("\n")[0]]
    return next((text for text in texts if text), "not said")[:80]


def table() -> str:
    """The page."""
    rows = {
        re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): licence(one)
        for one in distributions()
        if one.metadata["Name"] != "lightning-rl"
    }
    return HEAD + "".join(f"| {name} | {rows[name]} |\n" for name in sorted(rows))


if __name__ == "__main__":
    sys.stdout.write(table())
