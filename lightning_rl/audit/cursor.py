"""Counts of the rows that a data source returns, and the likelihood that it stopped advancing."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

Ids = tuple[int, ...]


class CursorWatch:
    """Counts the rows of all audited rollouts.

    A row is drawn too often if a pass contains it more often than the data. Rows that are drawn at random repeat those
    of a whole rollout with the product of their shares of the data as probability.

    Args:
        rows: Number of occurrences of each row of the data, or of a subset of a large one.
        length: Number of rows in a pass.
        period: Number of rows in a rollout.

    Attributes:
        nats: Negative log of the probability that random draws repeat the latest rollouts row by row.
        order_nats: Negative log of the probability that the latest rollouts of a shuffled pass are in the order of the
            pass before; before the first pass is the order of the data.
    """

    def __init__(self, rows: Counter[Ids], length: int, period: int) -> None:
        self._rows, self._length, self._period = rows, length, period
        self._often = -(-length // rows.total())  # rows of the data per row that was read
        self._in_pass = defaultdict[int, Counter[Ids]](Counter)
        self._last: dict[int, Ids] = {}
        self._order = dict(enumerate(rows)) if len(rows) == length else dict[int, Ids]()
        self.nats = self.order_nats = 0.0

    def draw(self, drawn: Mapping[int, Ids]) -> set[int]:
        """Count the rows of a rollout by place, and return the places of rows that their pass had already used up."""
        again, here = set[int](), {place % self._period: row for place, row in drawn.items()}
        for place, row in sorted(drawn.items()):
            counts = self._in_pass[place // self._length]
            counts[row] += 1
            if counts[row] > self._limit(row):
                again.add(place)
        chances = [self._limit(row) / self._length for row in here.values()]
        self.nats = self.nats - sum(map(math.log, chances)) if here == self._last else 0.0
        self._last = here
        offsets = {place % self._length: row for place, row in drawn.items()}
        kept = all(self._order.get(offset) == row for offset, row in offsets.items())
        chances = [min(self._limit(row) / (self._length - offset), 1.0) for offset, row in offsets.items()]
        self.order_nats = self.order_nats - sum(map(math.log, chances)) if kept else 0.0
        self._order |= offsets
        return again

    def _limit(self, row: Ids) -> int:
        """Return the number of times that one pass contains a row."""
        return min(max(self._rows[row], 1) * self._often, self._length)
