"""Entry point ``lightning-rl COMMAND``; each command is a module that is imported when it runs."""

import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_rl.cli.parser import command_line
from lightning_rl.cli.scripts import check_script

MODULES = {
    "consistency": "lightning_rl.cli.consistency",
    "doctor": "lightning_rl.cli.doctor",
    "export": "lightning_rl.cli.export",
    "from-trl": "lightning_rl.cli.from_trl",
    "ray": "lightning_rl.cli.ray",
    "replay": "lightning_rl.cli.replay",
    "report": "lightning_rl.cli.report",
    "resume-check": "lightning_rl.cli.resume_check",
    "serve": "lightning_rl.cli.serve",
}

SCRIPTS = ("recipe", "against")  # arguments that name a script


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and exit with the command's code; options after ``--`` are passed to the recipe."""
    parser = command_line()
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:cut])
    if parsed.version:
        from lightning_rl.configuration import versions  # imports torch

        sys.stdout.writelines(f"{name} {number}\n" for name, number in versions().items())
        sys.exit(0)
    if parsed.command is None:
        parser.error(f"expected a command out of {', '.join(MODULES)}, got none")
    for script in (getattr(parsed, name, None) for name in SCRIPTS):
        if script is not None:
            check_script(script)
    sys.exit(import_module(MODULES[parsed.command]).run(parsed, words[cut + 1 :]))
