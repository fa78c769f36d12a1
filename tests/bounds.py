"""Says whether the oldest versions that resolve are those that pyproject.toml claims; a claim below them was never run.

python tests/bounds.py build/oldest.txt
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUND = re.compile(r"^([A-Za-z0-9-]+)(?:\[.*\])?(?:>=|==)([\w.]+)")
NOT_RUN = {"vllm", "verifiers", "bitsandbytes", "torch", "lightning-rl"}  # environments of their own; TORCH names torch


def claims(project: str) -> dict[str, set[str]]:
    """The lower bounds of every package, with those of the extras."""
    declared = tomllib.loads(project)["project"]
    lines = [
        *declared["dependencies"],
        *(line for extra in declared["optional-dependencies"].values() for line in extra),
    ]
    found: dict[str, set[str]] = {}
    for line in lines:
        if match := BOUND.match(line):
            found.setdefault(match[1].lower(), set()).add(match[2])
    return found


def untrue(claimed: dict[str, set[str]], resolved: str) -> list[str]:
    """What is claimed and is not the version that was installed."""
    versions = dict(line.split(";")[0].strip().split("==") for line in resolved.splitlines() if "==" in line)
    return [
        f"{name}: {' and '.join(sorted(bounds))} claimed, {versions.get(name)} installed"
        for name, bounds in sorted(claimed.items())
        if name not in NOT_RUN and not any(same(bound, versions.get(name, "")) for bound in bounds)
    ]


def same(one: str, other: str) -> bool:
    """Whether two versions are the same but for zeros at the end."""
    return re.sub(r"(\.0)+$", "", one) == re.sub(r"(\.0)+$", "", other)


if __name__ == "__main__":
    wrong = untrue(claims((ROOT / "pyproject.toml").read_text()), Path(sys.argv[1]).read_text())
    sys.exit("\n".join(wrong) or 0)
