"""Finds what a built site links to and does not have, and what it would fetch from elsewhere.

    python docs/links.py build/docs/site

``make docs`` runs it behind the build: pages, pictures, scripts, styles and anchors. Links to other hosts are not
followed.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
FETCHED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "preconnect"}


class Page(HTMLParser):
    """Links, fetched files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what an element refers to."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values and tag != "meta"}
        relations = set(values.get("rel", "").split())
        for name in {"href", "src"} & values.keys():
            fetched = (tag, name) in FETCHED or (tag == "link" and relations & FETCHED_RELATIONS)
            (self.fetched if fetched else self.links).append(values[name])


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for each dead link, dead anchor, or file of another host."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for target in dict.fromkeys([*page.links, *page.fetched]):
            if complaint := _complaint(site, path, target, pages):
                yield f"{path.relative_to(site)}: {complaint}"


def _complaint(site: Path, path: Path, target: str, pages: dict[Path, Page]) -> str | None:
    if ELSEWHERE.match(target):
        fetched = target in pages[path].fetched and not target.startswith("data:")
        return f"fetches {target} from another host" if fetched else None
    name, anchor = urldefrag(target)
    file = path if not name else site / name.lstrip("/") if name.startswith("/") else path.parent / unquote(name)
    file = (file / "index.html" if file.is_dir() else file).resolve()
    if not file.exists():
        return f"links to {target}, which is not there"
    if anchor and file in pages and unquote(anchor) not in pages[file].anchors:
        return f"links to {target}, which has no such place"
    return None


def main(site: Path) -> int:
    """Prints what is wrong; returns the exit code."""
    found = list(problems(site.resolve()))
    sys.stderr.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
