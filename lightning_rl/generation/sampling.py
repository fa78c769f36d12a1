"""Sampling: how tokens are drawn, one value for the rollouts that train and for every evaluation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.arguments import check_counts, check_numbers


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of a response are drawn.

    The filters apply in the order min-p, top-k, top-p, each to what the one before has left of the distribution at the
    temperature; greedy answers are never filtered.

    Args:
        temperature: what the logits are divided by; 0 takes the likeliest token, which only an evaluation can.
        top_k: how many of the likeliest tokens are kept, and all that are as likely as the last of them; 0 keeps all.
        top_p: the least probability mass that is kept, likeliest first, in (0, 1]; 1 keeps all.
        min_p: tokens below this share of the highest probability are dropped, in [0, 1); 0 keeps all.
        max_new_tokens: most tokens of a response.
        stop: strings that end a response; the token that completes one belongs to it.
        eos_token_ids: ids that end a response and belong to it; None for those of the generation config and of the
            tokenizer.

    Raises:
        ValueError: if an option is out of range; the message names it.

    Example:
        >>> Sampling().filters, Sampling(top_p=0.9).filters, Sampling(top_p=0.9, temperature=0).filters
        (False, True, False)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    eos_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Checks the ranges and freezes the sequences."""
        check_numbers(at_least=0, finite=True, temperature=self.temperature)
        check_counts(0, top_k=self.top_k)  # 0 for no limit
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
        """Whether some tokens can never be drawn."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f'expected stop to be strings of at least one letter, such as ["</answer>"], got {stop!r}')
    return strings


def _token_ids(ids: Any) -> tuple[int, ...]:
    """Ids in ascending order, each once."""
    whole = isinstance(ids, Iterable) and not isinstance(ids, str)
    given: tuple[Any, ...] = tuple(ids) if whole else ()
    if not whole or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in given):
        raise ValueError(
            f"expected eos_token_ids to be token ids of at least 0, such as [2], or None for those of the model and "
            f"the tokenizer, got {ids!r}"
        )
    return tuple(sorted(set(given)))


class RowFilters:
    """Top-k, top-p and min-p of several rows, which may all differ, as tensors on the device of log-probabilities."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        rows = [sampling if sampling.filters else Sampling() for sampling in samplings]
        self.top_k = torch.tensor([row.top_k for row in rows], device=device)[:, None]
        self.top_p = torch.tensor([row.top_p for row in rows], device=device)[:, None]
        self.min_p = torch.tensor([row.min_p for row in rows], device=device)[:, None]

    def mask(self, logprobs: Float[Tensor, "L V"], rows: Int[Tensor, " L"]) -> Bool[Tensor, "L V"]:
        """The tokens that some rows may draw from their distributions, always the likeliest one.

        Example:
            >>> filters = RowFilters([Sampling(top_p=0.7), Sampling(top_k=1)], torch.device("cpu"))
            >>> filters.mask(torch.tensor([[0.5, 0.3, 0.2]] * 2).log(), torch.tensor([0, 1])).tolist()
            [[True, True, False], [True, False, False]]
        """
        top_k, top_p = self.top_k[rows], self.top_p[rows]
        ascending, order = logprobs.sort(-1)
        kth = torch.where(top_k > 0, logprobs.shape[-1] - top_k, 0).clamp(min=0)
        floor = torch.maximum(ascending.gather(1, kth), ascending[:, -1:] + self.min_p[rows].log())
        dropped = ascending < floor
        mass = ascending.masked_fill(dropped, -torch.inf).softmax(-1).cumsum(-1)
        dropped |= (mass <= 1 - top_p) & (top_p < 1)
        dropped[:, -1] = False
        return torch.zeros_like(dropped).scatter(1, order, ~dropped)
