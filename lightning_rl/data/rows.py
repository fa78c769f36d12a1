"""Rows by number: in memory, or in a memory-mapped ``datasets.Dataset``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any


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
