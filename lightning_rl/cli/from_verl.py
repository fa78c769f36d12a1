"""from-verl: the options of a GRPO run of verl as a recipe."""

import argparse
from collections.abc import Sequence

from lightning_rl.cli.translate import choices_of, write_recipe
from lightning_rl.translation.verl import from_verl


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code. What stands after ``--`` are overrides."""
    return write_recipe(
        arguments, lambda: from_verl(arguments.config, options, choices_of(arguments)), "docs/coming_from_verl.md"
    )
