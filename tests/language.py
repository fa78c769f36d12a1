"""Find words and docstrings that plain technical English avoids: ``python -m tests.language [FILE OR FOLDER ...]``.

Without arguments the folders in ``CHECKED`` are searched. Each finding is a line ``file:line: text``; exits with 1 if
there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
CHECKED = (
    "CONTRIBUTING.md",
    "README.md",
    "docs",
    "SECURITY.md",
    "benchmarks",
    "callbacks",
    "launch",
    "lightning_rl/__init__.py",
    "lightning_rl/__main__.py",
    "lightning_rl/advantages",
    "lightning_rl/algorithm.py",
    "lightning_rl/audit",
    "lightning_rl/base_module.py",
    "lightning_rl/checkpointing",
    "lightning_rl/cli",
    "lightning_rl/run_spec.py",
    "lightning_rl/setup_checks.py",
    "lightning_rl/configuration.py",
    "lightning_rl/corrections",
    "lightning_rl/data",
    "lightning_rl/distributed",
    "lightning_rl/environments",
    "lightning_rl/evaluation",
    "lightning_rl/generation",
    "lightning_rl/losses",
    "lightning_rl/metrics.py",
    "lightning_rl/module.py",
    "lightning_rl/optimizers.py",
    "lightning_rl/policy",
    "lightning_rl/presets.py",
    "lightning_rl/recording",
    "lightning_rl/reporting",
    "lightning_rl/rewards",
    "lightning_rl/rollout.py",
    "lightning_rl/rollouts",
    "lightning_rl/signal",
    "lightning_rl/serialization.py",
    "lightning_rl/utils/stop_iteration.py",
    "lightning_rl/testing",
    "lightning_rl/translation",
    "lightning_rl/update.py",
    "lightning_rl/utils",
    "lightning_rl/version.py",
    "recipes",
    "tests/generation",
    "tests/vllm",
    "tests/rewards",
    "tests/*.py",
    "tests/advantages",
    "tests/audit",
    "tests/callbacks",
    "tests/checkpointing",
    "tests/cli",
    "tests/corrections",
    "tests/data/*.py",
    "tests/distributed",
    "tests/environments",
    "tests/evaluation",
    "tests/faults",
    "tests/fuzz",
    "tests/goldens",
    "tests/kit",
    "tests/losses",
    "tests/policy",
    "tests/properties",
    "tests/quiet_bugs",
    "tests/recipes",
    "tests/recording",
    "tests/reporting",
    "tests/rollouts",
    "tests/signal",
    "tests/strategies",
    "tests/testing",
    "tests/translation",
)
# fmt: on
WORDS = re.compile(
    r"\b(?:nobody|somebody|whoever|whatever|anew|of (?:its|their) own"
    r"|in the place of|so many|once more|for ever)\b",
    re.IGNORECASE,
)
BEGINNINGS = re.compile(r"\s*(?:What|Whether|Who|Whose|Whom|How|Where|Why)\b")
SUFFIXES = {".py", ".md", ".js", ".yaml", ".toml", ".css", ".html"}


def files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the text files at and below the given paths, which may be patterns of ``glob``."""
    for name in paths:
        for path in sorted(ROOT.glob(name)):
            found = [path] if path.is_file() else sorted(path.rglob("*"))
            yield from (each for each in found if each.suffix in SUFFIXES and each != Path(__file__).resolve())


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each finding in a file."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for match in WORDS.finditer(line):
            yield number, f"avoid {match[0]!r}"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                if docstring is not None and BEGINNINGS.match(docstring):
                    yield node.body[0].lineno, f"start with a verb or a noun: {docstring.strip().splitlines()[0]!r}"


def main(paths: Sequence[str]) -> int:
    """Print the findings in the given paths; return 1 if there is one, else 0."""
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files(paths) for line, text in findings(path)]
    print("\n".join(found))  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or CHECKED))
