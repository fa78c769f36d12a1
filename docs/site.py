"""Builds the documentation site from the pages of this folder: ``make docs`` runs it where the builder is installed.

    python docs/site.py

The pages are written for a code host, with relative links to files of the repository. They are copied to
``build/docs``, where such a file becomes a page of the site, and a page is made for each part of the public interface.
Then MkDocs builds ``build/docs/site`` with ``mkdocs.yml``; a warning is an error, and so is a link that leads nowhere.
Pages that its navigation does not name come last.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import links
import yaml

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
PAGES = BUILD / "pages"
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
WIDE = re.compile(r"^\|(?:-+\|){5,}$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SHOWN = (".png", ".svg", ".css", ".js")
KINDS = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "bash", ".yml": "yaml", ".jsonl": "json"}
REFERENCE = {
    "lightning_rl": "the top of the package",
    "lightning_rl.callbacks": "corrections",
    "lightning_rl.losses": "losses",
    "lightning_rl.advantages": "estimators",
    "lightning_rl.signal.reductions": "reductions",
    "lightning_rl.signal.kl": "estimators of a KL",
    "lightning_rl.optimizers": "optimizers and schedules",
    "lightning_rl.presets": "published recipes as options",
    "lightning_rl.rewards": "rewards",
    "lightning_rl.environments": "environments and tools",
    "lightning_rl.environments.adapters": "environments of other packages",
    "lightning_rl.data": "prompts",
    "lightning_rl.evaluation": "evaluations",
    "lightning_rl.generation": "engines",
    "lightning_rl.corrections": "base classes of corrections",
    "lightning_rl.audit": "audit and ledger",
    "lightning_rl.recording": "recordings",
    "lightning_rl.reporting": "reports and tables",
    "lightning_rl.testing": "checks for your own code",
    "lightning_rl.checkpointing": "checkpoints",
    "lightning_rl.distributed": "strategies",
}


def main() -> int:
    """Builds the site; returns the exit code."""
    stage()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(BUILD / "mkdocs.yml"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if code := subprocess.run(command, check=False, env=environment).returncode:
        return code
    return links.main(BUILD / "site")


def stage() -> None:
    """Writes ``build/docs``: every page, the sources that they link to, the reference, the configuration."""
    shutil.rmtree(BUILD, ignore_errors=True)
    PAGES.mkdir(parents=True)
    sources: set[Path] = set()
    for page in [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in BESIDE)]:
        name = "readme.md" if page.name == "README.md" else page.name
        text = page.read_text()
        head = "---\nhide: [toc]\n---\n\n" if WIDE.search(text) else ""  # a wide table needs the room of the contents
        (PAGES / name).write_text(head + rewrite(text, page, sources))
    for picture in (one for one in (ROOT / "docs").rglob("*") if one.suffix in SHOWN):
        target = PAGES / picture.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    for source in sorted(sources):
        write_source(source, sources)
    write_reference()
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(configuration(), sort_keys=False))


def rewrite(text: str, page: Path, sources: set[Path]) -> str:
    """Return a page with its links as the site has them, and add the files that it links to to ``sources``."""

    def link(match: re.Match[str]) -> str:
        target = site_link(match[2], page, sources)
        return f"[{match[1]}]({target})"

    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[at : fence.start()]), fence[0]]
        at = fence.end()
    text = "".join([*parts, LINK.sub(link, text[at:])])
    return text.replace("](docs/", "](") if page.parent == ROOT else text


def site_link(target: str, page: Path, sources: set[Path]) -> str:
    """Return the target of a link on the site: for a file with a public name as anchor, its place in the reference."""
    if re.match(r"[a-z]+:|#", target):
        return target
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve()
    if ROOT not in file.parents or not file.exists():
        raise FileNotFoundError(f"{page.relative_to(ROOT)} links to {target}, which is not there")
    anchor = f"#{anchor}" if anchor else ""
    if file.parent == ROOT and file.name in BESIDE:
        return ("readme.md" if file.name == "README.md" else file.name) + anchor
    if file.is_relative_to(ROOT / "docs") and file.suffix in (".md", *SHOWN):
        return file.relative_to(ROOT / "docs").as_posix() + anchor
    homes = [module for module in REFERENCE if anchor[1:] in public_names(module)] if file.suffix == ".py" else []
    if homes:
        return f"reference/{homes[-1]}.md#{homes[-1]}.{anchor[1:]}"
    sources.add(file)
    return source_page(file).as_posix()


def source_page(file: Path) -> PurePosixPath:
    """The page of a file or folder of the repository."""
    return PurePosixPath("source") / f"{file.relative_to(ROOT).as_posix()}.md"


def write_source(file: Path, sources: set[Path]) -> None:
    """A page that shows a file, or what a folder holds."""
    target = PAGES / source_page(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = file.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if file.is_dir():
        held = sorted(one for one in file.iterdir() if not one.name.startswith((".", "__pycache__")))
        depth = "../" * (len(PurePosixPath(name).parts))
        lines = [f"* [{one.name}]({depth}{source_page(one)})" if one in sources else f"* {one.name}" for one in held]
        target.write_text(head + "\n".join(lines) + "\n")
        return
    fence = "`" * 6
    target.write_text(f"{head}{fence}{KINDS.get(file.suffix, 'text')}\n{file.read_text()}\n{fence}\n")


def public_names(module: str) -> list[str]:
    """The names in ``__all__`` of a module, or its public functions and classes, without importing it."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    definitions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node.name for node in definitions if not node.name.startswith("_")]


def write_reference() -> None:
    """A page for each part of the public interface, and one that lists them."""
    (PAGES / "reference").mkdir()
    index = ["# Reference", "", "Every public name, from its docstring.", ""]
    for module, what in REFERENCE.items():
        names = public_names(module)
        lines = [f"# {module}", "", f"{what[0].upper()}{what[1:]}.", ""]
        lines += [f"::: {module}.{name}\n" for name in names]
        (PAGES / "reference" / f"{module}.md").write_text("\n".join(lines))
        index.append(f"* [`{module}`]({module}.md): {what} ({len(names)})")
    (PAGES / "reference" / "index.md").write_text("\n".join(index) + "\n")


def configuration() -> dict[str, Any]:
    """``mkdocs.yml`` with its paths, and with the pages that are there and that it does not name."""
    options = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    nav = [section for section in map(existing, options["nav"]) if section is not None]
    left = sorted({page.name for page in PAGES.glob("*.md")} - set(named(nav)))
    if left:
        nav.append({"More": left})
    nav.append({"Reference": ["reference/index.md", *(f"reference/{module}.md" for module in REFERENCE)]})
    options |= {"docs_dir": str(PAGES), "site_dir": str(BUILD / "site"), "nav": nav}
    options["hooks"] = [str(ROOT / name) for name in options["hooks"]]
    for plugin in options["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            handler = plugin["mkdocstrings"]["handlers"]["python"]
            handler["paths"] = [str(ROOT)]
            handler["options"]["extensions"] = [str(ROOT / name) for name in handler["options"]["extensions"]]
    return options


def existing(entry: Any) -> Any:
    """An entry of the navigation without pages that are not there; None if nothing is left."""
    if isinstance(entry, str):
        return entry if (PAGES / entry).exists() else None
    if isinstance(entry, list):
        return [part for part in map(existing, entry) if part is not None] or None
    ((title, inner),) = entry.items()
    kept = existing(inner)
    return None if kept is None else {title: kept}


def named(entry: Any) -> list[str]:
    """The pages of a navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for part in inner for page in named(part)]


if __name__ == "__main__":
    sys.exit(main())
