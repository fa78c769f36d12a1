"""Write the table of TRL's options in docs/coming_from_trl.md. Run ``python docs/coming_from_trl.py``."""

from collections.abc import Mapping
from pathlib import Path

from lightning_rl.translation.trl_options import FURTHER, OPTIONS, RENAMED, Option

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- docs/coming_from_trl.py writes what follows -->\n", "<!-- up to here -->\n"
REASON = "`from-trl` prints the reason"
OPTION_HEAD = """
| option of TRL | in lightning-rl | | note |
|---|---|---|---|
"""


FURTHER_HEAD = """
Options of older versions of TRL and transformers, of open-r1 and of unsloth, and arguments of `GRPOTrainer`:

| option | in lightning-rl | | note |
|---|---|---|---|
"""


def rows(options: Mapping[str, Option]) -> str:
    """Return the rows of a table; options that differ only by name share one, as do those without a counterpart."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, option in options.items():
        note = option.note if option.ours else REASON
        verdict = "ignored" if option.verdict == "different" and not option.ours else option.verdict
        groups.setdefault((option.ours, verdict, note), []).append(f"`{name}`")
    return "".join(f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in groups.items())


def table() -> str:
    """Return the tables of options."""
    renamed = "".join(f"| `{old}` | as `{new}` | same |  |\n" for old, new in RENAMED.items())
    return OPTION_HEAD + rows(OPTIONS) + FURTHER_HEAD + renamed + rows(FURTHER)


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
