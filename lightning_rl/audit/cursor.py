"""Likelihood that a data source repeats rows because it stopped advancing."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

Ids = tuple[int, ...]
AGAIN = 0.9  # share of repeated rows of a source that stopped advancing


class CursorWatch:
    r"""Counts the rows of all audited rollouts.

    A row is drawn too often if the passes so far do not contain it that often. If rows are drawn at random, the
    probability of that is the share of the rows that were drawn as often as the passes contain them. Two stopped
    sources are compared with random draws: one draws such rows with a probability of :data:`AGAIN`, the other repeats
    the row at the same place of the previous rollout with that probability. Under random draws each likelihood ratio
    exceeds :math:`e^n` with a probability of at most :math:`e^{-n}`, and so does their mean.

    Source: Ville 1939, "Etude critique de la notion de collectif"; Page 1954, "Continuous inspection schemes".

    Args:
        rows: Number of occurrences of each row of the data, or of a subset of a large one.
        length: Number of rows in a pass.
        period: Number of rows in a rollout.
    """

    def __init__(self, rows: Counter[Ids], length: int, period: int) -> None:
        self._rows, self._length, self._period = rows, length, period
        self._often = -(-length // rows.total())  # rows of the data per row that was read
        self._in_pass, self._totals = defaultdict[int, Counter[Ids]](Counter), Counter[Ids]()
        self._passes = self._full = 0
        self._last: dict[int, Ids] = {}
        self._among, self._same = 0.0, 0.0

    @property
    def nats(self) -> float:
        """Log of the likelihood ratio of a stopped source to random draws, over all rollouts so far; at least 0."""
        return max(max(self._among, self._same) - math.log(2.0), 0.0)

    def draw(self, drawn: Mapping[int, Ids]) -> set[int]:
        """Count the rows of a rollout by place, and return the places of rows that their pass had already used up."""
        again, begun, last = set[int](), bool(self._totals), dict[int, Ids]()
        for place, row in sorted(drawn.items()):
            number, limit = place // self._length, self._limit(row)
            self._in_pass[number][row] += 1
            if self._in_pass[number][row] > limit:
                again.add(place)
            self._begin_pass(number - min(self._in_pass) + 1)
            if begun:
                self._weigh(row, self._last.get(place % self._period))
            self._totals[row] += 1
            self._full += limit if self._totals[row] == limit * self._passes else 0
            last[place % self._period] = row
        self._last, self._among, self._same = last, max(self._among, 0.0), max(self._same, 0.0)
        return again

    def _limit(self, row: Ids) -> int:
        """Return the number of times that one pass contains a row."""
        return max(self._rows[row], 1) * self._often

    def _begin_pass(self, passes: int) -> None:
        if passes != self._passes:
            self._passes = passes
            self._full = sum(self._limit(row) for row in self._totals if self._is_full(row))

    def _is_full(self, row: Ids | None) -> bool:
        """Return True if a row was drawn as often as all passes contain it."""
        return row is not None and self._totals[row] >= self._limit(row) * self._passes

    def _weigh(self, row: Ids, before: Ids | None) -> None:
        """Add the likelihood ratios of a draw; ``before`` is the previous row at the same place."""
        self._among += _ratio(self._full / self._length, hit=self._is_full(row))
        if before is not None and self._is_full(before):
            self._same += _ratio(self._limit(before) / self._length, hit=row == before)


def _ratio(chance: float, *, hit: bool) -> float:
    """Return the log-likelihood ratio of a stopped source to random draws for one draw."""
    if chance >= AGAIN:
        return 0.0
    return math.log(AGAIN / chance) if hit else math.log((1.0 - AGAIN) / (1.0 - chance))
