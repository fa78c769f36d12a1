"""Readers of JSON Lines, JSON and CSV files; errors name file and line."""

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rl.data.rows import MemoryRows
from lightning_rl.utils.naming import in_words
from lightning_rl.utils.strict_json import parse_json

SAVE_UTF_8 = "it is in another encoding, such as Latin-1: save it as UTF-8"
LFS = b"version https://git-lfs.github.com/spec"
DELIMITERS = (";", "\t", "|", ",")


def refuse_pointer(path: Path) -> None:
    """Refuse a file that holds the pointer of Git LFS rather than its content.

    Raises:
        ValueError: With the file.
    """
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise ValueError(f"expected rows of data, got a Git LFS pointer in {path}: run git lfs pull")


def read_json_lines(path: Path) -> MemoryRows:
    """Return the rows of a JSON Lines file, one JSON value per line that is not blank, read into memory.

    Raises:
        ValueError: If a line is not JSON; with the file and the line.
    """
    rows, lines = list[Any](), list[int]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):  # binary mode, because text mode splits at U+2028 in strings
            if line.strip():
                try:
                    rows.append(parse_json(line.removeprefix(BOM_UTF8).decode()))
                except ValueError as error:
                    text = line.decode("utf-8", errors="replace").strip()
                    coded = isinstance(error, UnicodeDecodeError)
                    cure = _cure(error, "write each row as one line, with nothing after it")
                    raise ValueError(
                        f"expected one JSON value on each line{', in UTF-8' if coded else ''}, got {text[:80]!r} in "
                        f"{path}, line {number} ({error}): {cure}"
                    ) from error
                lines.append(number)
    return MemoryRows(rows, partial(_line_of, path, lines))


def _cure(error: ValueError, misplaced: str) -> str:
    """Return the cure of an error; ``misplaced`` is that of text which is no JSON."""
    if isinstance(error, UnicodeDecodeError):
        return SAVE_UTF_8
    return misplaced if isinstance(error, json.JSONDecodeError) else "write null for a missing number, and flat values"


def _line_of(path: Path, lines: Sequence[int], number: int) -> str:
    """Return file and line of a row."""
    return f"{path}, line {lines[number]}"


def read_json(path: Path) -> MemoryRows:
    """Return the rows of a JSON file with one list, read into memory.

    Raises:
        ValueError: If the file is not JSON or holds another type.
    """
    try:
        rows = parse_json(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        cure = _cure(error, "rename a file with one value on each line to .jsonl")
        raise ValueError(f"expected {path} to hold one JSON list of rows, got an error ({error}): {cure}") from error
    if not isinstance(rows, list):
        keys = f" with the entries {in_words(rows)}" if isinstance(rows, Mapping) else ""
        raise ValueError(
            f"expected {path} to hold a JSON list of rows, got a {type(rows).__name__}{keys}: write "
            '[{"prompt": ...}, ...], or one row on each line of a .jsonl file'
        )
    return MemoryRows(rows, partial("{}, item {}".format, path))


def read_csv(path: Path, delimiter: str = ",") -> MemoryRows:
    """Return the rows of a CSV file with a header, read into memory; all values are strings.

    Raises:
        ValueError: If the header or a line is malformed; with the file, the line and the columns.
    """
    records = _csv_records(path, delimiter)
    first, names = next(records, (1, list[str]()))
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(
            f"expected a header with a unique name for each column, got {in_words(names)} in {path}, line {first}"
        )
    other = next((mark for mark in DELIMITERS if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        raise ValueError(
            f"expected values with {delimiter!r} between them, got the header {names[0]!r} in {path}, line {first}, "
            f"whose values are separated by {other!r}: save the file with {delimiter!r}, or tabs as .tsv"
        )
    rows, lines = list[dict[str, str]](), list[int]()
    for number, values in records:
        if len(values) != len(names):
            raise ValueError(
                f"expected {len(names)} values for the columns {in_words(names)}, got {len(values)} in {path}, line "
                f"{number}: quote a value that holds a {delimiter!r}"
            )
        rows.append(dict(zip(names, values, strict=True)))
        lines.append(number)
    return MemoryRows(rows, partial(_line_of, path, lines))


def _csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield first line and values of each record that is not blank."""
    with path.open("rb") as file:
        lines = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(file))
        records = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            first = records.line_num + 1
            try:
                values = next(records, None)
            except (csv.Error, UnicodeDecodeError) as error:
                quoted = 'quote a value that holds a separator, a quote or a newline, and write "" for a quote in it'
                raise ValueError(
                    f"expected values with {delimiter!r} between them, in UTF-8, got an error in {path}, line {first} "
                    f"({error}): {SAVE_UTF_8 if isinstance(error, UnicodeDecodeError) else quoted}"
                ) from error
            if values is None:
                return
            if values:
                yield first, values
