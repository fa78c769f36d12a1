r"""Repetition penalty by the share of repeated n-grams in a completion.

.. math::
    r = -\Bigl(1 - \frac{|\text{different } n\text{-grams}|}{|n\text{-grams}|}\Bigr)

Source: seq-rep-n of Welleck et al. 2019, arXiv:1908.04319, section 6.1; as a reward: Yeo et al. 2025, arXiv:2502.03373.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rl.rewards.text import ids_of, texts_of
from lightning_rl.utils.arguments import check_choices, check_counts


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Repetition penalty: 0 if no n-gram occurs twice or the completion is shorter than n, else down to -1.

    Args:
        n: Number of tokens or words of an n-gram.
        unit: ``"tokens"``, as sampled, or ``"words"`` separated by whitespace, case-insensitive; not for languages that
            write words without spaces.

    Raises:
        ValueError: If ``n`` is below 1, or the unit is unknown.

    Example:
        >>> Repetition(n=1, unit="words")(["?"] * 2, ["a b c", "a A a a"])
        [0.0, -0.75]
    """

    n: int = 4
    unit: Literal["tokens", "words"] = "tokens"

    def __post_init__(self) -> None:
        """Check the options."""
        check_counts(1, n=self.n)
        check_choices(("tokens", "words"), unit=self.unit)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one value per completion."""
        if self.unit == "tokens":
            return [self._value(ids) for ids in ids_of(completions, completion_ids, reward=self)]
        return [self._value(text.casefold().split()) for text in texts_of(completions)]

    def _value(self, units: Sequence[Any]) -> float:
        shifted = [units[start:] for start in range(self.n)]
        grams = list(zip(*shifted, strict=False))  # stops at the shortest
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
