"""Cursor: whether rows of the data return too early, and how much likelier that is for a source that has stopped."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

Ids = tuple[int, ...]
AGAIN = 0.9  # share of the rows that a source draws again which has stopped to move


class CursorWatch:
    r"""Counts the rows of all rollouts that are looked at.

    A row is drawn too often if so many passes over the data do not hold it that often. Where rows are drawn by lot, the
    probability of that is the share of the rows that have been drawn as often as the passes hold them. Two sources
    that have stopped are compared with the lot: one draws such rows with a probability of :data:`AGAIN`, the other with
    that probability the very row at the same place of the rollout before. Of either the ratio of likelihoods exceeds a
    bound :math:`e^n` with a probability of at most :math:`e^{-n}` under the lot, and so does the mean of both.

    Source: Ville 1939, "Etude critique de la notion de collectif"; Page 1954, "Continuous inspection schemes".

    Args:
        rows: of the data, of a large one some, each with its number.
        length: rows of one pass.
        period: rows of one rollout.
    """

    def __init__(self, rows: Counter[Ids], length: int, period: int) -> None:
        self._rows, self._length, self._period = rows, length, period
        self._often = -(-length // rows.total())  # rows of the data for each that was read
        self._in_pass, self._totals = defaultdict[int, Counter[Ids]](Counter), Counter[Ids]()
        self._passes = self._full = 0
        self._last: dict[int, Ids] = {}
        self._among, self._same = 0.0, 0.0

    @property
    def nats(self) -> float:
        """How much likelier all rollouts so far are for a source that has stopped, as a logarithm; 0 or more."""
        return max(max(self._among, self._same) - math.log(2.0), 0.0)

    def draw(self, drawn: Mapping[int, Ids]) -> set[int]:
        """Counts the rows of a rollout by their places, and returns the places of those that their pass has had."""
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
        """How often one pass holds a row."""
        return max(self._rows[row], 1) * self._often

    def _begin_pass(self, passes: int) -> None:
        if passes != self._passes:
            self._passes = passes
            self._full = sum(self._limit(row) for row in self._totals if self._is_full(row))

    def _is_full(self, row: Ids | None) -> bool:
        """Whether a row has been drawn as often as all passes hold it."""
        return row is not None and self._totals[row] >= self._limit(row) * self._passes

    def _weigh(self, row: Ids, before: Ids | None) -> None:
        """Takes one more draw into account, after another one at the same place."""
        self._among += _ratio(self._full / self._length, hit=self._is_full(row))
        if before is not None and self._is_full(before):
            self._same += _ratio(self._limit(before) / self._length, hit=row == before)


def _ratio(chance: float, *, hit: bool) -> float:
    """How much likelier a draw is for a source that has stopped than by lot: a logarithm, of a mean of 1 by lot."""
    if chance >= AGAIN:
        return 0.0
    return math.log(AGAIN / chance) if hit else math.log((1.0 - AGAIN) / (1.0 - chance))
