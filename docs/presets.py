"""Writes docs/presets.md: what each preset sets, read from the presets themselves. Run ``python docs/presets.py``."""

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


def shown(value: Any) -> str:
    """An option as one would write it."""
    if isinstance(value, RLCallback):
        known = inspect.signature(type(value)).parameters
        given = {name: getattr(value, name) for name in known if name in vars(value)}
        changed = {name: own for name, own in given.items() if name == "beta" or own != known[name].default}
        named = {name: own.__name__ if inspect.isfunction(own) else own for name, own in changed.items()}
        inner = ", ".join(f"{name}={own!r}" for name, own in named.items())
        return f"{type(value).__name__}({inner})"
    return value.__name__ if inspect.isfunction(value) else repr(value)


def page() -> str:
    """The whole page."""
    rows = []
    for name, make in PRESETS.items():
        preset, text = make(), inspect.getdoc(make) or ""
        options = "<br>".join(f"`{key}={shown(value)}`" for key, value in preset.options.items())
        corrections = "<br>".join(f"`{shown(callback)}`" for callback in preset.callbacks) or "none"
        source = " ".join(text.partition("Source:")[2].split())
        rows.append(f"| `{name}` | {options} | {corrections} | {source} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
