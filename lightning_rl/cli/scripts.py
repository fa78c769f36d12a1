"""Validation of scripts before a command imports anything, and messages for their errors."""

import ast
import traceback
import warnings
from pathlib import Path

CONFIGURATIONS = (".yaml", ".yml")


def check_script(script: Path) -> None:
    """Check that Python can run a script.

    Raises:
        SystemExit: With the reason if it cannot.
    """
    if not script.is_file():
        got = "a folder: name the file in it" if script.is_dir() else "no such file"
        raise SystemExit(f"expected {script} to be a script that calls Trainer.fit, got {got}")
    if script.suffix in CONFIGURATIONS:
        raise SystemExit(
            f"expected a script that calls Trainer.fit, got the configuration {script}: pass the script that runs "
            f"LightningCLI, and its options after --, such as train.py -- fit --config {script}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # they are shown when the script runs
            ast.parse(script.read_bytes())
    except SyntaxError as wrong:
        line = f"line {wrong.lineno}: " if wrong.lineno else ""
        raise SystemExit(f"expected {script} to be a Python script, got {line}{wrong.msg}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as wrong:
        raise SystemExit(f"expected {script} to be a Python script, got {wrong}") from None


def sentence_of(error: Exception, script: Path) -> str:
    """Return a script's error with the last line of the traceback in its folder."""
    folder = script.parent.resolve()
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places = [(file, line) for file, line in frames if file.resolve().parent == folder]
    file, line = places[-1] if places else (script, None)
    at = f"{file}, line {line}" if line else str(file)
    return f"{at}: {type(error).__name__}: {error}; run the script itself for the traceback"
