"""Sampling parameters, for training and evaluation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.utils.arguments import check_counts, check_numbers, refuse_other_names


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a response.

    The filters apply in the order min-p, top-k, top-p, each to the tokens left by the previous one, at the given
    temperature. Greedy sampling ignores them.

    Args:
        temperature: Divisor of the logits; 0 is greedy, which only an evaluation may use.
        top_k: Number of most likely tokens to keep, with ties of the last one; 0 keeps all, and 1 is greedy too.
        top_p: Smallest probability mass to keep, most likely tokens first, in (0, 1]; 1 keeps all.
        min_p: Share of the highest probability below which tokens are dropped, in [0, 1); 0 keeps all.
        max_new_tokens: Maximum number of tokens of a response.
        stop: Strings that end a response; the token that completes one belongs to it.
        eos_token_ids: Ids that end a response and belong to it; None for those of the generation config and the
            tokenizer.

    Raises:
        ValueError: If an option is out of range; names it.

    Example:
        >>> [SamplingParams(**given).filters for given in ({}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0})]
        [False, True, False]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    eos_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check ranges and turn sequences into tuples."""
        check_numbers(at_least=0, finite=True, temperature=self.temperature)
        check_counts(0, top_k=self.top_k)
        check_numbers(above=0, at_most=1, top_p=self.top_p)
        check_numbers(at_least=0, at_most=1, min_p=self.min_p)
        if self.min_p == 1:
            raise ValueError("expected min_p below 1, got 1: no token but the likeliest would be left")
        check_counts(1, max_new_tokens=self.max_new_tokens)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", _token_ids(self.eos_token_ids))

    @property
    def filters(self) -> bool:
        """True if a filter applies."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    def check_random(self, use: str) -> None:
        """Raise ValueError if only the likeliest token can be sampled; ``use`` is what needs different samples.

        The likeliest token has at least the mass 1 / V, and no model has a vocabulary of more than a million tokens.
        """
        greedy = {"temperature": self.temperature == 0, "top_k": self.top_k == 1, "top_p": self.top_p <= 1e-6}
        for name in (name for name, alone in greedy.items() if alone):
            raise ValueError(
                f"expected random sampling for {use}, got {name}={getattr(self, name):g}, with which all samples of a "
                f"prompt are equal: raise {name}"
            )


SamplingParams.__init__ = refuse_other_names("SamplingParams")(SamplingParams.__init__)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f'expected stop to be non-empty strings, such as ["</answer>"], got {stop!r}')
    return strings


def _token_ids(ids: Any) -> tuple[int, ...]:
    """Return the distinct ids in ascending order."""
    whole = isinstance(ids, Iterable) and not isinstance(ids, str)
    given: tuple[Any, ...] = tuple(ids) if whole else ()
    if not whole or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in given):
        raise ValueError(
            f"expected eos_token_ids to be token ids of at least 0, such as [2], or None for those of the model and "
            f"the tokenizer, got {ids!r}"
        )
    return tuple(sorted(set(given)))
