"""Report: one HTML file of a run; rollouts that do not fit are in files beside it.

Data of the run are compressed and encoded in base64, so they cannot close an HTML element. Scripts and styles are those
of this package. The content security policy lists their hashes, and allows no other script and no connection.
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
from lightning_rl.glossary import entry_of
from lightning_rl.recording import Recording
from lightning_rl.reporting.pages import page_of, summary_of
from lightning_rl.reporting.run_files import UNREADABLE, RunFiles, read_folder
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.version import __version__

ASSETS = files("lightning_rl.reporting") / "assets"
STYLES = ("uplot.min.css", "report.css")
SCRIPTS = ("uplot.min.js", "dom.js", "data.js", "shares.js", "colours.js", "chart.js", "curves.js", "flow.js")
SCRIPTS += ("samples.js", "tokens.js", "compare.js", "pages.js", "main.js")
EMBEDDED = 24 * 2**20  # maximum length of base64 in the file itself
OWN_FOLDER = "report"  # subfolder of the logger's folder, where RunReport writes
PAGES = "-rollouts"  # suffix of the folder with further rollouts

AlgorithmsOf = Callable[[int], Sequence[Algorithm]]


@dataclass(frozen=True, slots=True)
class Page:
    """Rollout in a report.

    Attributes:
        summary: Entry in the list of rollouts.
        text: Block in base64.
    """

    summary: dict[str, Any]
    text: str


@dataclass
class Pages:
    """Cache of pages by their files, so that rewriting a report builds only new pages."""

    made: dict[tuple[tuple[str, int], ...], Page] = field(default_factory=dict)

    def of(self, paths: Sequence[Path], algorithms: AlgorithmsOf | None = None) -> Page:
        """Return the page of a rollout from the files of all ranks.

        Raises:
            ValueError: Naming the file that is not a recording.
        """
        key = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
        if key not in self.made:
            recordings = sorted(
                (Recording.load(path) for path in paths), key=lambda recording: recording.header["rank"]
            )
            chosen = None if algorithms is None else algorithms(len(recordings))
            block = base64.b64encode(page_of(recordings, chosen)).decode()
            self.made[key] = Page(summary_of(recordings), block)
        return self.made[key]

    def keep(self, paths: Sequence[Sequence[Path]]) -> None:
        """Drop pages of deleted files."""
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
    """Write the report of a run and return the data read.

    Args:
        folders: Folders of the run; see :mod:`lightning_rl.reporting.run_files`.
        path: Path of the HTML file; rollouts that do not fit are in a folder beside it.
        title: Title; by default the last names of the first folder.
        pages: Cache of pages.
        algorithms: Function that returns the algorithms of a rollout for a number of ranks; by default the recorded
            ones.
        embedded: Maximum length of base64 in the file; the newest rollouts come first.

    Raises:
        FileNotFoundError: If there is nothing to report.
        ValueError: If the folders hold several runs.
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
        "metrics": {
            name: [sorted(values), [values[step] for step in sorted(values)]]
            for name, values in sorted(run.metrics.items())
        },
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
    """Return a distinctive name of a folder, such as ``sorting/version_3``."""
    whole = folder.resolve()
    return "/".join((whole.parent if whole.name == OWN_FOLDER else whole).parts[-2:]).lstrip("/")


def _divide(pages: Mapping[int, Page], letters: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the rollouts in the file, the newest that fit, and of those beside it."""
    inside: list[int] = []
    for number in sorted(pages, reverse=True):
        letters -= len(pages[number].text)
        if letters < 0:
            break
        inside.append(number)
    return sorted(inside), sorted(pages.keys() - set(inside))


def _render(index: Mapping[str, Any], pages: Mapping[int, str], *, beside: bool) -> str:
    """Return the HTML; text from the run is escaped or in base64."""
    scripts, styles = ([_asset(name) for name in names] for names in (SCRIPTS, STYLES))
    sources = [_hash(script) for script in scripts] + (["file:", "'self'"] if beside else [])
    policy = (
        f"default-src 'none'; script-src {' '.join(sources)}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )
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
