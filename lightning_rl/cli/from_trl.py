"""from-trl: a configuration of TRL as a recipe."""

import argparse
from collections.abc import Sequence

from lightning_rl.cli.translate import choices_of, write_recipe
from lightning_rl.translation.trl import from_trl


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code."""
    del options
    return write_recipe(arguments, lambda: from_trl(arguments.config, choices_of(arguments)), "docs/coming_from_trl.md")
