"""Writes the licence of every installed package as a table.

python tests/licences.py > docs/licences.md
"""

import re
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

UPLOT = "1.6.32"
HEAD = f"""# Licences

Of every package that `make install` puts into `.venv`, as its metadata says, written by `make licences`. The library
itself is Apache-2.0 and carries none of them. What it carries is a library for charts, in every
[report](report.md), and, in the documentation site alone, one by which its search works from a folder:

| carried | licence |
|---|---|
| uPlot {UPLOT} | MIT |
| iframe-worker 1.0.4 | MIT |

| package | licence |
|---|---|
"""


TEXTS = {"www.apache.org/licenses": "Apache-2.0", "Permission is hereby granted, free of charge": "MIT"}


def licence(distribution: Distribution) -> str:
    """What a package says of its licence: an SPDX expression, its classifiers, the first line of a text, its file."""
    data: Any = distribution.metadata
    named = [line.rpartition(" :: ")[2] for line in data.get_all("Classifier") or [] if line.startswith("License ::")]
    texts = [data.get("License-Expression"), " and ".join(named), (data.get("License") or "").strip().split("\n")[0]]
    files = "".join(distribution.read_text(f"licenses/{name}") or "" for name in data.get_all("License-File") or [])
    texts += [name for words, name in TEXTS.items() if words in files]
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
