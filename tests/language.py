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
CHECKED = ("*.md", "benchmarks", "callbacks", "docs", "launch", "lightning_rl", "recipes", "tests")
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
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        match node:
            case ast.Expr(value=ast.Constant(value=str() as docstring)) if BEGINNINGS.match(docstring):
                yield node.lineno, f"start with a verb or a noun: {docstring.strip().splitlines()[0]!r}"


def main(paths: Sequence[str]) -> int:
    """Print the findings in the given paths; return 1 if there is one, else 0."""
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files(paths) for line, text in findings(path)]
    print("\n".join(found))  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or CHECKED))
