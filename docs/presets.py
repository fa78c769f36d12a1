"""Write the table of presets in docs/choosing.md from the presets themselves. Run ``python docs/presets.py``."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from lightning_rl.corrections import RLCallback
from lightning_rl.presets import PRESETS

PAGE = Path(__file__).with_name("choosing.md")
BEGIN, END = "<!-- docs/presets.py writes what follows -->\n", "<!-- up to here -->\n"
HEAD = """| preset | options | corrections | source |
|---|---|---|---|
"""


def source_of(value: Any) -> str:
    """Return the source of an option, without defaults."""
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


def table() -> str:
    """Return the table."""
    rows = []
    for name, make in PRESETS.items():
        preset, text = make(), inspect.getdoc(make) or ""
        options = "<br>".join(f"`{key}={source_of(value)}`" for key, value in preset.options.items())
        corrections = "<br>".join(f"`{source_of(callback)}`" for callback in preset.callbacks) or "none"
        source = " ".join(text.partition("Source:")[2].split())
        rows.append(f"| `{name}` | {options} | {corrections} | {source} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
