"""Sources of prompts: a list, a file, a folder, a data set of the Hugging Face hub, a ``datasets.Dataset``."""

import glob
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.data.file_readers import read_csv, read_json, read_json_lines, refuse_pointer
from lightning_rl.data.row_schema import CONTENT, QUESTIONS
from lightning_rl.data.rows import ArrowRows, JoinedRows, MemoryRows, MixedRows, SourceRows
from lightning_rl.utils.naming import in_words

PromptSource = str | Path | Iterable[Any]  # str first, because jsonargparse takes the first type that matches
NAMES_DATA = re.compile(r"[\w.~*-]*[A-Za-z*][\w.*-]*/[\w./*?\[\]-]+")  # a data set of the hub, or a path or pattern
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
READERS = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": lambda path: read_csv(path, delimiter="\t"),
    ".parquet": lambda path: ArrowRows(_load("parquet", None, "train", data_files=str(path))),
}
LINE_BY_LINE = (".jsonl", ".ndjson", ".csv", ".tsv")  # errors of these readers name file and line
MAX_SHOWN = 300  # characters
NEED_DATASETS = 'pip install "lightning-rl[data]"'


def open_source(source: Any, *, name: str | None = None, split: str | None = None) -> Any:
    """Return the :class:`SourceRows` of a source; a ``datasets.IterableDataset`` is returned as it is.

    Args:
        source: A list or other indexable with a length; an iterator, which is read into a list; the path of a file
            (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``) or folder, a pattern such as ``"data/*.jsonl"``,
            or a list of these, which are read one after another; the name of a data set of the hub; a
            ``datasets.Dataset`` or ``IterableDataset``; a mapping from names to several of these with a length.
        name: Configuration of a data set of the hub.
        split: Split of the data set or of a ``datasets.DatasetDict``.

    Raises:
        ValueError: If the source has another type or no rows, or if it has several splits and none is selected.
        FileNotFoundError: If the file does not exist.
    """
    if isinstance(source, Mapping) and not _has_splits(source):
        return _mix(source, name, split)
    place = f" in {source}" if isinstance(source, str | Path) else ""
    if isinstance(source, Iterable) and not hasattr(source, "__len__"):
        source = source if is_hugging_face(source, "IterableDataset") else list(source)
    if isinstance(source, list | tuple) and _are_files(source):
        place = f" in {', '.join(map(str, source))}"[:MAX_SHOWN]
        source = _join([path for item in source for path in _paths(item)], name, split)
        split = name = None
    elif isinstance(source, str | Path):
        paths = _paths(source)
        source = _open_path(paths[0], name, split) if len(paths) == 1 else _join(paths, name, split)
        split = name = None
    source = _choose_split(source, split)
    if name is not None:
        raise ValueError(f'expected name="{name}" with the name of a data set, got a {type(source).__name__}')
    if is_hugging_face(source, "IterableDataset"):
        return source
    rows = source if isinstance(source, SourceRows) else _rows_of(source)
    if place and not len(rows):
        raise ValueError(f"expected at least one prompt, got none{place}")
    return rows


def _mix(sources: Mapping[Any, Any], name: str | None, split: str | None) -> SourceRows:
    """Return the rows of several sources by name."""
    if (
        not sources
        or not all(isinstance(each, str) and each for each in sources)
        or {*CONTENT, *QUESTIONS} & sources.keys()
    ):
        raise ValueError(
            f"expected a list of rows, or data sets by name, got a mapping with {in_words(map(str, sources))}: for a "
            "mapping from columns to their values pass datasets.Dataset.from_dict(columns), or [dict(zip(columns, "
            "row)) for row in zip(*columns.values())]"
        )
    parts = {each: open_source(source, name=name, split=split) for each, source in sources.items()}
    for each, part in parts.items():
        if not isinstance(part, SourceRows) or not len(part):
            got = "no rows" if isinstance(part, SourceRows) else "an IterableDataset"
            raise ValueError(
                f'expected data sets with rows in a mixture, got {got} for "{each}": leave it out, or mix streams by '
                "datasets.interleave_datasets"
            )
    return MixedRows([*parts.values()], [*parts])


def _has_splits(source: Any) -> bool:
    return is_hugging_face(source, "DatasetDict") or is_hugging_face(source, "IterableDatasetDict")


def _rows_of(source: Any) -> SourceRows:
    """Return the rows of an object in memory or memory-mapped."""
    if is_hugging_face(source, "Dataset"):
        return ArrowRows(source)
    _check_rows(source)
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return MemoryRows(source if sized and not isinstance(source, list) else list(source))


def is_hugging_face(value: Any, kind: str) -> bool:
    """Return True if ``value`` is of a class of ``datasets``; never imports ``datasets``."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, getattr(datasets, kind))


def _are_files(rows: Sequence[Any]) -> bool:
    """Return True for a list of paths: all of its items name files, or one is a file of data that exists."""
    texts = (row for row in rows if isinstance(row, str) and len(row) <= MAX_SHOWN and row.endswith((*READERS,)))
    return (len(rows) > 0 and all(map(_names_file, rows))) or any(Path(text).expanduser().is_file() for text in texts)


def _names_file(item: Any) -> bool:
    """Return True for a path, and for a text that names a file of data rather than being a prompt about one."""
    if not isinstance(item, str):
        return isinstance(item, Path)
    if not item or len(item) > MAX_SHOWN or "\n" in item:
        return False
    path = Path(item).expanduser()
    like_data = path.suffix in (*READERS, *COMPRESSED) and not any(map(str.isspace, item))
    like_data = like_data or NAMES_DATA.fullmatch(item) is not None
    return like_data or ((path.suffix != "" or "/" in item) and path.exists())


def _paths(source: str | Path) -> list[str | Path]:
    """Return the paths of a source: its own, with the home folder for ``~``, or those that fit its pattern."""
    text = str(source)
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if path.exists() or not glob.has_magic(text) or (isinstance(source, str) and any(map(str.isspace, text))):
        return [path if isinstance(source, Path) or text.startswith("~") else source]
    if not (paths := sorted(glob.glob(str(path), recursive=True))):  # noqa: PTH207  of a whole path
        raise FileNotFoundError(f"expected files of prompts, got none for {text!r}: check {path.absolute()}")
    return [Path(each) for each in paths]


def _join(paths: Sequence[str | Path], name: str | None, split: str | None) -> SourceRows:
    """Return the rows of several files, one after another."""
    if missing := [str(path) for path in paths if not Path(path).exists()]:
        raise FileNotFoundError(
            f"expected a list of files, got {missing[0]!r:.300}, which is none: check the path, or pass "
            "datasets.concatenate_datasets([...]) for several data sets of the hub"
        )
    parts = [_open_path(path, name, split) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if not isinstance(part, SourceRows) and not is_hugging_face(part, "Dataset"):
            kind = type(part).__name__
            raise ValueError(f"expected a list of files, got {path}, a {kind}: name its files, or pass it by itself")
    return JoinedRows(
        [part if isinstance(part, SourceRows) else ArrowRows(part) for part in parts], list(map(str, paths))
    )


def _open_path(source: str | Path, name: str | None, split: str | None) -> Any:
    path = Path(source)
    if path.is_file() or path.suffix in READERS:
        if path.suffix not in READERS:
            packed = path.suffix in COMPRESSED
            cure = (
                f"decompress it to {path.with_suffix('').name}"
                if packed
                else "rename it, if it is in one of these formats"
            )
            raise ValueError(f"expected a file whose name ends in {in_words(READERS)}, got {path}: {cure}")
        if not path.is_file():
            raise FileNotFoundError(f"expected a file of prompts, got {path}, which is none: check {path.absolute()}")
        if name is not None or split not in (None, "train"):
            raise ValueError(f"expected no name= and no split= with a file, got name={name!r}, split={split!r}, {path}")
        refuse_pointer(path)
        return READERS[path.suffix](path)
    if isinstance(source, Path) and not path.is_dir():
        raise FileNotFoundError(f"expected a file or folder of prompts, got {path}: check {path.absolute()}")
    if not path.is_dir() and not HUB_NAME.fullmatch(str(source)):
        raise ValueError(
            f"expected the path of a file ({in_words(READERS)}) or folder, or the name of a data set such as "
            f'"openai/gsm8k", got {source!r:.200}: write a single prompt as a list, ["..."]'
        )
    return _choose_split(_load(str(source), name, split), split)


def _load(path: str, name: str | None, split: str | None, **options: Any) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"expected the package datasets to read {path}, got none: {NEED_DATASETS}") from error
    folder = Path(path)
    for file in folder.rglob("*") if folder.is_dir() else ():
        if file.suffix in READERS and file.is_file():
            refuse_pointer(file)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(path)
    try:
        return datasets.load_dataset(path, name, split=split, **options)
    except Exception as error:
        for file in sorted(folder.rglob("*")) if folder.is_dir() else []:  # our readers name the file and the line
            if file.suffix in LINE_BY_LINE:
                READERS[file.suffix](file)
        described = {"name": name, "split": split, **options}
        asked = ", ".join([repr(path), *(f"{option}={value!r}" for option, value in described.items())])
        cause = error.__cause__ or error
        raise ValueError(
            f"expected a data set that datasets.load_dataset({asked}) can read, but it raised {type(error).__name__}: "
            f"{error}{f' ({type(cause).__name__}: {cause})' if cause is not error else ''}"
        ) from error


def _choose_split(source: Any, split: str | None) -> Any:
    if not _has_splits(source):
        if split is not None and not (is_hugging_face(source, "Dataset") or is_hugging_face(source, "IterableDataset")):
            raise ValueError(
                f'expected split="{split}" with a data set that has splits, got a {type(source).__name__}: leave it out'
            )
        return source
    if split is None:
        raise ValueError(
            f"expected one split of the data set, got a {type(source).__name__} with the splits {in_words(source)}: "
            f'choose with split="{next(iter(source), "...")}"'
        )
    if split not in source:
        raise ValueError(f'expected one of the splits {in_words(source)}, got split="{split}"')
    return source[split]


def _check_rows(source: Any) -> None:
    kind = type(source).__name__
    if isinstance(source, set | frozenset):
        raise ValueError(f"expected ordered rows, got a {kind}: pass sorted(rows)")
    if hasattr(source, "columns") and hasattr(source, "to_dict"):
        raise ValueError(f'expected a list of rows, got a {kind}: pass frame.to_dict("records")')
    if isinstance(source, bytes | bytearray) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise ValueError(
            f"expected a list of prompts, a file, the name of a data set or a datasets.Dataset, got {source!r:.100} "
            f"({kind})"
        )
