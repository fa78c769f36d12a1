"""Rows by number: in memory, or in a memory-mapped ``datasets.Dataset``."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

SOURCE = "source"  # column of a mixture


class SourceRows(ABC):
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

    def headers(self) -> Iterator[tuple[int | None, Sequence[str] | Mapping[str, Any]]]:
        """Yield the columns of rows that are known without a cost, with the number of the row; None for all rows."""
        return iter(())

    def batches(self, size: int = 1024) -> Iterator[tuple[range, list[Any]]]:
        """Yield all rows in order, ``size`` at a time, with their numbers."""
        for start in range(0, len(self), size):
            numbers = range(start, min(start + size, len(self)))
            yield numbers, self.take(numbers)


class MemoryRows(SourceRows):
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

    def headers(self) -> Iterator[tuple[int | None, Sequence[str] | Mapping[str, Any]]]:
        """Yield the rows with columns of a list, and the first one of another object."""
        for number, row in enumerate(self.take(range(len(self) if isinstance(self.rows, list) else 1))):
            if isinstance(row, Mapping):
                yield number, row


class ArrowRows(SourceRows):
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

    def headers(self) -> Iterator[tuple[int | None, Sequence[str] | Mapping[str, Any]]]:
        """Yield the columns of all rows."""
        yield None, self.dataset.column_names


class JoinedRows(SourceRows):
    """Rows of several sources, one after another; ``names`` are those of the sources."""

    def __init__(self, parts: Sequence[SourceRows], names: Sequence[str]) -> None:
        self.parts, self.names = parts, names
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._starts[-1]

    def _find(self, number: int) -> tuple[int, int]:
        """Return the part of a row, and its number in the part."""
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers; each part reads its rows together."""
        wanted: dict[int, list[int]] = {}
        for number in numbers:
            wanted.setdefault(self._find(number)[0], []).append(number)
        rows: dict[int, Any] = {}
        for part, mine in wanted.items():
            rows |= zip(mine, self.parts[part].take([number - self._starts[part] for number in mine]), strict=True)
        return [rows[number] for number in numbers]

    def place(self, number: int) -> str:
        """Return the file of a row, and its position in it."""
        part, inner = self._find(number)
        return self.parts[part].place(inner) or f"{self.names[part]}, row {inner}"

    def headers(self) -> Iterator[tuple[int | None, Sequence[str] | Mapping[str, Any]]]:
        """Yield the columns of every part; those of a whole part with its first row."""
        for part, start in zip(self.parts, self._starts, strict=False):
            for number, names in part.headers():
                yield start + (number or 0), names


class MixedRows(JoinedRows):
    """Rows of named sources, one after another, with the name of its source in the column ``source`` of each row."""

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with the given numbers; a row without columns becomes the prompt.

        Raises:
            ValueError: If a row has a column ``source`` already.
        """
        return [self._with_source(number, row) for number, row in zip(numbers, super().take(numbers), strict=True)]

    def _with_source(self, number: int, row: Any) -> Mapping[str, Any]:
        row = row if isinstance(row, Mapping) else {"prompt": row}
        if SOURCE in row:
            raise ValueError(
                f'expected rows of a mixture without a column "{SOURCE}", which names their data set, got '
                f"{row[SOURCE]!r:.80} in {self.place(number)}: rename the column"
            )
        return {**row, SOURCE: self.names[self._find(number)[0]]}

    def headers(self) -> Iterator[tuple[int | None, Sequence[str] | Mapping[str, Any]]]:
        """Yield the columns of every part, with ``source``."""
        for number, names in super().headers():
            yield number, [*names, SOURCE]

    def sizes(self, kept: Sequence[int] | None = None) -> list[int]:
        """Return the number of rows of each source, of those in ``kept`` (ascending) if some are dropped."""
        ends = self._starts if kept is None else [bisect_left(kept, start) for start in self._starts]
        return [end - start for start, end in pairwise(ends)]
