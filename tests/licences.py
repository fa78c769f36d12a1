"""Write the licences of all installed packages as a table.

python tests/licences.py > docs/licences.md
"""

import re
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

UPLOT = "1.6.32"
HEAD = f"""# Licences

This page lists the licences of the packages that `make install` puts into `.venv`, from the packages' metadata.
`make licences` writes the page. The library itself is Apache-2.0 and contains none of these packages. Every
[report](inspecting.md#report) contains the chart library uPlot. The documentation site contains iframe-worker, with
which its search works if the site is opened from a folder:

| contained library | licence |
|---|---|
| uPlot {UPLOT} | MIT |
| iframe-worker 1.0.4 | MIT |

| licence | packages |
|---|---|
"""


TEXTS = {"www.apache.org/licenses": "Apache-2.0", "Permission is hereby granted, free of charge": "MIT"}


def licence(distribution: Distribution) -> str:
    """Return the licence of a package: an SPDX expression, its classifiers, the first line of a text, or its file."""
    data: Any = distribution.metadata
    named = [line.rpartition(" :: ")[2] for line in data.get_all("Classifier") or [] if line.startswith("License ::")]
    texts = [data.get("License-Expression"), " and ".join(named), (data.get("License") or "").strip().split("\n")[0]]
    files = "".join(distribution.read_text(f"licenses/{name}") or "" for name in data.get_all("License-File") or [])
    texts += [name for words, name in TEXTS.items() if words in files]
    return next((text for text in texts if text), "not said")[:80]


def table() -> str:
    """Return the page."""
    rows = {
        re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): licence(one)
        for one in distributions()
        if one.metadata["Name"] != "lightning-rl"
    }
    groups: dict[str, list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(rows[name], []).append(name)
    return HEAD + "".join(f"| {text} | {', '.join(groups[text])} |\n" for text in sorted(groups, key=str.lower))


if __name__ == "__main__":
    sys.stdout.write(table())
