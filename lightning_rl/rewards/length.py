"""Reward for the length of a completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.text import column_of, ids_of, texts_of
from lightning_rl.utils.arguments import check_choices, check_counts, check_text


@dataclass(frozen=True, kw_only=True)
class Length:
    r"""Length reward: 1 within bounds, falling linearly to 0 over ``margin`` outside of them.

    .. math::
        r = \max\Bigl(0,\ 1 - \frac{d}{\mathit{margin}}\Bigr)

    with :math:`d` the distance to the nearer bound; without a margin, 0 for any distance but 0.

    Args:
        min_length: Minimum length with reward 1.
        max_length: Maximum length with reward 1; None for no limit.
        target: The length with reward 1, or the name of the column that holds it, instead of both bounds.
        margin: Distance from the bounds at which the reward is 0.
        unit: ``"tokens"``, as sampled and including the end-of-sequence token, or ``"characters"``.

    Raises:
        ValueError: If a bound or the margin is negative, the bounds cross, a target is given with bounds, there is no
            bound, or the unit is unknown.

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
        """Check the options."""
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
                f"expected min_length or max_length, or else target, got min_length={self.min_length}, "
                f"max_length={self.max_length} and target={self.target!r}"
            )
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(f"expected min_length <= max_length, got {self.min_length} and {self.max_length}")

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.target: "target"} if isinstance(self.target, str) else {}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one value per completion; None where the column of targets holds None."""
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
