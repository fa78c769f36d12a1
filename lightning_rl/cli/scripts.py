"""Scripts that a command is to run: refused before anything is imported for them, and their errors told by the line."""

import ast
import traceback
import warnings
from pathlib import Path

CONFIGURATIONS = (".yaml", ".yml")


def check_script(script: Path) -> None:
    """Refuses what Python could not run.

    Raises:
        SystemExit: saying what lies there instead of a script.
    """
    if not script.is_file():
        got = "a folder: name the file in it" if script.is_dir() else "no such file"
        raise SystemExit(f"expected {script} to be a script that calls Trainer.fit, got {got}")
    if script.suffix in CONFIGURATIONS:
        raise SystemExit(
            f"expected a script that calls Trainer.fit, got the configuration {script}: name the script that runs "
            f"LightningCLI, and behind -- its options, such as train.py -- fit --config {script}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # it is told of them when it runs
            ast.parse(script.read_bytes())
    except SyntaxError as wrong:
        line = f"line {wrong.lineno}: " if wrong.lineno else ""
        raise SystemExit(f"expected {script} to be a script of Python, got {line}{wrong.msg}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as wrong:
        raise SystemExit(f"expected {script} to be a script of Python, got {wrong}") from None


def sentence_of(error: Exception, script: Path) -> str:
    """What a script raised, with the last line that lies in its folder."""
    folder = script.parent.resolve()
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places = [(file, line) for file, line in frames if file.resolve().parent == folder]
    file, line = places[-1] if places else (script, None)
    at = f"{file}, line {line}" if line else str(file)
    return f"{at}: {type(error).__name__}: {error}; run the script itself for the traceback"
