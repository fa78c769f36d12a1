"""from-trl: translates a configuration of TRL to a recipe."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rl.translation.trl import RefusedError, UnreadableError, from_trl
from lightning_rl.utils.atomic_write import write_atomically


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Write the recipe and return the exit code.

    Raises:
        SystemExit: With each refused option and its reason, or with the error of the file; nothing is written.
    """
    del options
    output: Path | None = arguments.output
    if output is not None and (output.is_dir() or output.resolve() == arguments.config.resolve()):
        raise SystemExit(f"expected a file to write to, got {output}, which is a folder or the configuration")
    try:
        source, notes = from_trl(
            arguments.config,
            arguments.devices,
            arguments.model,
            arguments.reward,
            arguments.prompts,
            arguments.ignore,
        )
    except UnreadableError as error:
        raise SystemExit(str(error)) from error
    except RefusedError as error:
        lines = [f"refused {name}: {reason}" for name, reason in error.reasons.items()]
        lines += ["nothing was written; docs/coming_from_trl.md lists every option"]
        lines += [f"to leave options out: --ignore {' '.join(error.reasons)}"]
        raise SystemExit("\n".join(lines)) from error
    if output is None:
        sys.stdout.write(source)
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, lambda part: Path(part).write_text(source, encoding="utf-8"))
    sys.stderr.write(f"{output}: {len(notes)} notes in its docstring; check with: lightning-rl doctor {output}\n")
    return 0
