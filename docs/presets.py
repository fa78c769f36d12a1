"""Writes docs/presets.md: what each preset sets, read from the presets themselves. Run ``python docs/presets.py``."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from lightning_rl.corrections import RLCallback
from lightning_rl.presets import PRESETS

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Presets

One function per published recipe in `lightning_rl.presets`; each only sets options of the module and adds corrections.
Made by `python docs/presets.py`.

| preset | options | corrections | source |
|---|---|---|---|
"""


def source_of(value: Any) -> str:
    """An option as one would write it, without what is the default."""
    if inspect.isfunction(value):
        return value.__name__
    if not (isinstance(value, RLCallback) or dataclasses.is_dataclass(value)):
        return repr(value)
    arguments = []
    for name, parameter in inspect.signature(type(value)).parameters.items():
        argument = getattr(value, name, parameter.default)
        if argument != parameter.default or name == "beta":
            arguments.append(f"{name}={source_of(argument)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def page() -> str:
    """The whole page."""
    rows = []
    for name, make in PRESETS.items():
        preset, text = make(), inspect.getdoc(make) or ""
        options = "<br>".join(f"`{key}={source_of(value)}`" for key, value in preset.options.items())
        corrections = "<br>".join(f"`{source_of(callback)}`" for callback in preset.callbacks) or "none"
        source = " ".join(text.partition("Source:")[2].split())
        rows.append(f"| `{name}` | {options} | {corrections} | {source} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
