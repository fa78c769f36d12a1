"""``lightning-rl COMMAND``: the commands, each of which lies in a file of its own."""

import argparse
import sys
from collections.abc import Sequence

from lightning_rl.cli import doctor, replay, resume_check, serve

COMMANDS = (doctor, replay, resume_check, serve)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and exits with the command's code. What stands after ``--`` is for the recipe."""
    parser = argparse.ArgumentParser(prog="lightning-rl", description="Tools around runs of lightning_rl.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.register(commands)
    own = list(sys.argv[1:] if arguments is None else arguments)
    cut = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:cut])
    sys.exit(given.run(given, own[cut + 1 :]))
