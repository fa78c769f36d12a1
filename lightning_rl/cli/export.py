"""export: writes the policy of a checkpoint as a Hugging Face folder, without a fit."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.checkpointing import LostCodeError
from lightning_rl.cli.output import say
from lightning_rl.module import RLLightningModule


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    del options
    parts = {name: getattr(arguments, name) for name in ("policy", "critic", "tokenizer")}
    export(arguments.checkpoint, arguments.folder, **{name: part for name, part in parts.items() if part is not None})
    return 0


def export(checkpoint: Path, folder: Path, **parts: str) -> None:
    """Write policy, tokenizer and a separate critic.

    Args:
        checkpoint: Checkpoint file.
        folder: Folder to write to.
        parts: ``policy``, ``critic`` and ``tokenizer`` where the checkpoint names none that can be loaded: a name, a
            path, or ``module:function``.

    Raises:
        SystemExit: With the missing part.
    """
    try:
        sources: dict[str, Any] = {name: source_of(part) for name, part in parts.items()}
        if callable(tokenizer := sources.get("tokenizer")):
            sources["tokenizer"] = tokenizer()
        module = RLLightningModule.load_from_checkpoint(checkpoint, **sources)
    except LostCodeError as missing:
        raise SystemExit(str(LostCodeError(missing.lost, "--{}"))) from missing
    except (ValueError, ImportError, AttributeError, FileNotFoundError) as refused:
        raise SystemExit(str(refused)) from refused
    module.save_pretrained(folder)
    say(f"{folder}: load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def source_of(part: str) -> str | Callable[[], Any]:
    """Return a name or path as it is, and the function that ``module:function`` names."""
    module, colon, name = part.partition(":")
    if not colon:
        return part
    sys.path[:0] = [""] if "" not in sys.path else []
    return getattr(importlib.import_module(module), name)
