"""Report: one HTML file that holds a run, or all of it that fits, with the other rollouts in files beside it.

Whatever comes from the run is compressed and written in base64, whose letters end no element; scripts and styles are
those of this package, each named by its hash in the page's content security policy, which allows no other and no
connection at all.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from lightning_rl.algorithm import Algorithm
from lightning_rl.files import write_atomically
from lightning_rl.reporting.folder import UNREADABLE, RunFiles, load_rollout, read_folder
from lightning_rl.reporting.glossary import entry_of
from lightning_rl.reporting.pages import page_of, summary_of
from lightning_rl.version import __version__

ASSETS = files("lightning_rl.reporting") / "assets"
STYLES = ("uplot.min.css", "report.css")
SCRIPTS = ("uplot.min.js", "dom.js", "data.js", "shares.js", "colours.js", "chart.js", "curves.js", "flow.js")
SCRIPTS += ("samples.js", "tokens.js", "compare.js", "pages.js", "main.js")
EMBEDDED = 24 * 2**20  # letters of base64 in the file itself
OWN_FOLDER = "report"  # in that of the logger, where RunReport writes
PAGES = "-rollouts"  # of the folder with further ones, behind the name of the report

AlgorithmsOf = Callable[[int], Sequence[Algorithm]]


@dataclass(frozen=True, slots=True)
class Page:
    """A rollout as a report holds it.

    Attributes:
        summary: a line of the list of rollouts.
        text: the block in base64.
    """

    summary: dict[str, Any]
    text: str


@dataclass
class Pages:
    """Pages by the files that they were made from, so that a report that is written again makes new ones alone."""

    made: dict[tuple[tuple[str, int], ...], Page] = field(default_factory=dict)

    def of(self, paths: Sequence[Path], algorithms: AlgorithmsOf | None = None) -> Page:
        """The page of a rollout, given the files of all ranks.

        Raises:
            ValueError: naming the file that is no recording.
        """
        key = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
        if key not in self.made:
            recordings = load_rollout(paths)
            chosen = None if algorithms is None else algorithms(len(recordings))
            block = base64.b64encode(page_of(recordings, chosen)).decode()
            self.made[key] = Page(summary_of(recordings), block)
        return self.made[key]

    def keep(self, paths: Sequence[Sequence[Path]]) -> None:
        """Drops pages of files that are gone."""
        names = {str(path) for each in paths for path in each}
        self.made = {key: page for key, page in self.made.items() if all(name in names for name, _ in key)}


def write_report(
    folders: Sequence[Path],
    path: Path,
    *,
    title: str = "",
    pages: Pages | None = None,
    algorithms: AlgorithmsOf | None = None,
    embedded: int = EMBEDDED,
) -> RunFiles:
    """Writes the report of a run.

    Args:
        folders: of the run; see :mod:`lightning_rl.reporting.folder`.
        path: of the HTML file; rollouts that do not fit into it lie in a folder beside it.
        title: what the report is called; by default the last names of the first folder.
        pages: those that were made before.
        algorithms: what makes the algorithms of a rollout for its number of ranks; by default the recorded ones.
        embedded: letters of rollouts in the file itself; the newest come first.

    Returns:
        What was read.

    Raises:
        FileNotFoundError: if there is nothing to report.
        ValueError: if the folders hold several runs.
    """
    run, pages = read_folder(folders), pages or Pages()
    pages.keep(list(run.rollouts.values()))
    made: dict[int, Page] = {}
    for number, paths in run.rollouts.items():
        try:
            made[number] = pages.of(paths, algorithms)
        except UNREADABLE as wrong:
            run.notes.append(str(wrong))
    inside, outside = _divide(made, embedded)
    folder = path.with_name(path.stem + PAGES)
    for number in outside:
        folder.mkdir(parents=True, exist_ok=True)
        text = f'lightningRLPage({number}, "{made[number].text}");\n'
        write_atomically(folder / f"{number}.js", lambda part, text=text: part.write_text(text, encoding="ascii"))
    index = {
        "title": title or _title(folders[0]),
        "version": __version__,
        "metrics": {name: _columns(values) for name, values in sorted(run.metrics.items())},
        "glossary": {name: entry.to_json() for name in run.metrics if (entry := entry_of(name)) is not None},
        "configuration": run.configuration,
        "findings": run.findings,
        "notes": run.notes,
        "end": None if run.end is None else asdict(run.end),
        "rollouts": [
            {**made[number].summary, "file": f"{folder.name}/{number}.js" if number in outside else None}
            for number in sorted(made)
        ],
    }
    text = _render(index, {number: made[number].text for number in inside}, beside=bool(outside))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    return run


def _title(folder: Path) -> str:
    """What a folder is told apart by, such as ``sorting/version_3``."""
    whole = folder.resolve()
    return "/".join((whole.parent if whole.name == OWN_FOLDER else whole).parts[-2:]).lstrip("/")


def _divide(pages: Mapping[int, Page], letters: int) -> tuple[list[int], list[int]]:
    """Numbers of the rollouts in the file, the newest as far as they fit, and of those beside it."""
    inside: list[int] = []
    for number in sorted(pages, reverse=True):
        letters -= len(pages[number].text)
        if letters < 0:
            break
        inside.append(number)
    return sorted(inside), sorted(pages.keys() - set(inside))


def _columns(values: Mapping[int, float]) -> list[list[float]]:
    steps = sorted(values)
    return [list(steps), [values[step] for step in steps]]


def _render(index: Mapping[str, Any], pages: Mapping[int, str], *, beside: bool) -> str:
    """The HTML; every text in it that is not this package's is escaped or in base64."""
    scripts, styles = ([_asset(name) for name in names] for names in (SCRIPTS, STYLES))
    sources = [_hash(script) for script in scripts] + (["file:", "'self'"] if beside else [])
    policy = f"default-src 'none'; script-src {' '.join(sources)}; style-src 'unsafe-inline'; base-uri 'none'"
    compressed = gzip.compress(json.dumps(index, default=str).encode(), mtime=0)
    template = Environment(autoescape=True).from_string(_asset("report.html"))
    return template.render(
        title=index["title"],
        policy=policy,
        styles=[Markup(style) for style in styles],
        scripts=[Markup(script) for script in scripts],
        index=base64.b64encode(compressed).decode(),
        pages=pages,
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
