"""Says whether the oldest versions that resolve are those that pyproject.toml claims; a claim below them was never run.

python tests/bounds.py build/oldest.txt
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUND = re.compile(r"^([A-Za-z0-9-]+)(?:\[.*\])?(?:>=|==)([\w.]+)")
EXTRAS = re.compile(r"^lightning-rl\[(.*)\]$")


def claims(project: str) -> dict[str, set[str]]:
    """The lower bounds of every package that ``dev`` installs but torch, which TORCH names.

    Extras outside of ``dev`` run in separate environments.
    """
    declared = tomllib.loads(project)["project"]
    lines, found = [*declared["dependencies"], *declared["optional-dependencies"]["dev"]], dict[str, set[str]]()
    for line in lines:
        if extras := EXTRAS.match(line):
            lines += [each for name in extras[1].split(",") for each in declared["optional-dependencies"][name]]
        elif (match := BOUND.match(line)) and match[1] != "torch":
            found.setdefault(match[1].lower(), set()).add(match[2])
    return found


def untrue(claimed: dict[str, set[str]], resolved: str) -> list[str]:
    """Return the claimed bounds that are not the installed version."""
    versions = dict(line.split(";")[0].strip().split("==") for line in resolved.splitlines() if "==" in line)
    return [
        f"{name}: {' and '.join(sorted(bounds))} claimed, {versions.get(name)} installed"
        for name, bounds in sorted(claimed.items())
        if not any(same(bound, versions.get(name, "")) for bound in bounds)
    ]


def same(one: str, other: str) -> bool:
    """Return True if two versions differ only in trailing zeros."""
    return re.sub(r"(\.0)+$", "", one) == re.sub(r"(\.0)+$", "", other)


if __name__ == "__main__":
    wrong = untrue(claims((ROOT / "pyproject.toml").read_text()), Path(sys.argv[1]).read_text())
    sys.exit("\n".join(wrong) or 0)
