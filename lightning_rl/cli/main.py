"""``lightning-rl COMMAND``: one function for each command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rl.cli.resume_check import resume_check


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and exits with the command's code."""
    parser = argparse.ArgumentParser(prog="lightning-rl", description="Tools around runs of lightning_rl.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser(
        "resume-check", help="interrupt a recipe after every optimizer step, resume it, and compare"
    )
    checking.add_argument("recipe", type=Path, help="a script that calls Trainer.fit")
    checking.add_argument("--steps", type=int, default=8, help="optimizer steps of the whole run")
    checking.add_argument("--first", type=int, default=1, help="first step to interrupt after")
    checking.epilog = "What stands after -- is passed on to the recipe."
    own = list(sys.argv[1:] if arguments is None else arguments)
    cut = own.index("--") if "--" in own else len(own)
    given, options = parser.parse_args(own[:cut]), own[cut + 1 :]
    sys.exit(resume_check(given.recipe, options, steps=given.steps, first=given.first))
