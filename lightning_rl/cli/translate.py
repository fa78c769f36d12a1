"""What the commands that translate configurations share: the recipe to a file or the terminal, refusals by name."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_rl.files import write_atomically
from lightning_rl.translation.option import RefusedError
from lightning_rl.translation.recipe import Given, Recipe
from lightning_rl.translation.scripts import UnreadableError
from lightning_rl.translation.values import NoYAMLError


def choices_of(arguments: argparse.Namespace) -> Given:
    """What the command line says beside the configuration."""
    return Given(
        devices=getattr(arguments, "devices", 1),
        model=arguments.model,
        rewards=tuple(arguments.reward),
        prompts=arguments.prompts,
    )


def write_recipe(arguments: argparse.Namespace, translate: Callable[[], Recipe], page: str) -> int:
    """Writes what was asked for; returns the exit code.

    Raises:
        SystemExit: with every refused option and its reason, or what is wrong with the file; nothing is written then.
    """
    try:
        recipe = translate()
        documents = [(arguments.output, recipe.script())]
        if arguments.yaml is not None:
            documents.append((arguments.yaml, recipe.yaml()))
    except UnreadableError as error:
        raise SystemExit(str(error)) from error
    except RefusedError as error:
        lines = [f"refused {name}: {reason}" for name, reason in error.reasons.items()]
        raise SystemExit("\n".join([*lines, f"nothing was written; {page} lists every option"])) from error
    except NoYAMLError as error:
        raise SystemExit(f"expected values for YAML, got code: {error}: leave --yaml out") from error
    for path, _ in documents:
        if path is not None and (path.is_dir() or path.resolve() == arguments.config.resolve()):
            raise SystemExit(f"expected another file to write to than {path}, which is a folder or the configuration")
    for path, text in documents:
        if path is None:
            sys.stdout.write(text)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda part, text=text: Path(part).write_text(text, encoding="utf-8"))
    if arguments.output is not None:
        figures = f"{recipe.count} options translated, {len(recipe.notes)} with a note in the file, 0 refused"
        sys.stderr.write(f"{arguments.output}: {figures}; check with: lightning-rl doctor {arguments.output}\n")
    return 0
