"""Rows by number: in memory, in a text file, or in a memory-mapped ``datasets.Dataset``."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Rows(ABC):
    """Rows of a source, by number."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers, in that order."""

    def place(self, number: int) -> str:  # noqa: ARG002
        """Return the position of a row in its file; empty without a file."""
        return ""

    def batches(self, size: int = 1024) -> Iterator[tuple[range, list[Any]]]:
        """Yield all rows in order, ``size`` at a time, with their numbers."""
        for start in range(0, len(self), size):
            numbers = range(start, min(start + size, len(self)))
            yield numbers, self.take(numbers)


class MemoryRows(Rows):
    """Rows of an indexable object; ``places`` returns the position of a row in a file."""

    def __init__(self, rows: Any, places: Callable[[int], str] | None = None) -> None:
        self.rows, self._places = rows, places

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers."""
        return [self.rows[number] for number in numbers]

    def place(self, number: int) -> str:
        """Return the position of a row in its file."""
        return "" if self._places is None else self._places(number)


class ArrowRows(Rows):
    """Rows of a memory-mapped ``datasets.Dataset``, as plain Python values."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format(None)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers."""
        columns = self.dataset[numbers if isinstance(numbers, range) else list(numbers)]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class FileRows(Rows):
    """Rows of a text file; only their positions are in memory, 24 bytes per row.

    ``spans`` are first byte, number of bytes and first line of each row, flattened; ``parse`` gets the bytes of a row.
    """

    def __init__(self, path: Path, spans: "array[int]", parse: Callable[[bytes], Any]) -> None:
        self.path, self.parse = path, parse
        self.spans = np.array(spans, dtype=np.int64).reshape(-1, 3)
        self._version = _version(path)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.spans)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers.

        Raises:
            RuntimeError: If the file has changed since it was opened.
        """
        if _version(self.path) != self._version:
            raise RuntimeError(
                f"expected {self.path} to stay as it was when the run began, but it was modified: start again, or "
                "restore the file and resume"
            )
        rows = []
        with self.path.open("rb") as file:
            for begin, size, _ in self.spans[list(numbers)].tolist():
                file.seek(begin)
                rows.append(self.parse(file.read(size)))
        return rows

    def place(self, number: int) -> str:
        """Return file and line of a row."""
        return f"{self.path}, line {self.spans[number, 2]}"


def _version(path: Path) -> tuple[int, int] | None:
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns
