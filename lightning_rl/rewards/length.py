"""Length: whether a completion is as long as wanted, with a soft edge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rl.arguments import check_choices, check_counts, check_text
from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.text import column_of, ids_of, texts_of


@dataclass(frozen=True, kw_only=True)
class Length:
    r"""1 within bounds, and down to 0 over ``margin`` outside of them.

    .. math::
        r = \max\Bigl(0,\ 1 - \frac{d}{\mathit{margin}}\Bigr)

    with :math:`d` the distance to the nearer bound; without a margin, 0 for any distance but 0.

    Args:
        min_length: the shortest length that gets 1.
        max_length: the longest one; None for no limit.
        target: in place of both bounds: the one length that gets 1, or the column that holds it for each row.
        margin: how far from the bounds the value is 0.
        unit: ``"tokens"``, as the policy sampled them, an end of sequence included, or ``"characters"``.

    Raises:
        ValueError: if a bound or the margin is negative, the bounds cross, a target comes beside bounds, nothing is
            bounded, or the unit is unknown.

    Example:
        >>> Length(max_length=4, margin=2, unit="characters")(["?"] * 3, ["four", "fives", "sixsix"])
        [1.0, 0.5, 0.0]
    """

    min_length: int = 0
    max_length: int | None = None
    target: int | str | None = None
    margin: int = 0
    unit: Literal["tokens", "characters"] = "tokens"

    def __post_init__(self) -> None:
        """Checks the options."""
        check_choices(("tokens", "characters"), unit=self.unit)
        check_counts(0, min_length=self.min_length, margin=self.margin)
        check_counts(0, optional=True, max_length=self.max_length)
        if isinstance(self.target, str):
            check_text(target=self.target)
        else:
            check_counts(0, optional=True, target=self.target)
        bounded = bool(self.min_length) or self.max_length is not None
        if bounded == (self.target is not None):
            raise ValueError(
                f"expected either min_length or max_length, or a target, got min_length={self.min_length}, "
                f"max_length={self.max_length} and target={self.target!r}"
            )
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(f"expected min_length <= max_length, got {self.min_length} and {self.max_length}")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]] = (),
        **columns: Any,
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards; None where the column of targets holds None."""
        if self.unit == "tokens":
            lengths = [len(ids) for ids in ids_of(completions, completion_ids, reward=self)]
        else:
            lengths = [len(text) for text in texts_of(completions)]
        if not isinstance(self.target, str):
            low, high = (self.min_length, self.max_length) if self.target is None else (self.target, self.target)
            return [self._value(length, low, high) for length in lengths]
        targets = column_of(columns, self.target, len(lengths), option="target", reward=self)
        return score_rows(lengths, targets, self._score_row, column=self.target, option="target", reward=self)

    def _score_row(self, length: int, target: Any) -> float:
        if isinstance(target, bool) or not isinstance(target, int) or target < 0:
            raise UnreadableReference(f"expected a length, a whole number of at least 0, got {target!r:.200}")
        return self._value(length, target, target)

    def _value(self, length: int, low: int, high: int | None) -> float:
        distance = max(low - length, 0 if high is None else length - high, 0)
        if not distance:
            return 1.0
        return max(0.0, 1.0 - distance / self.margin) if self.margin else 0.0
