"""Sampling: how tokens are drawn, one value for the rollouts that train and for every evaluation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.arguments import check_counts, check_numbers

CANDIDATES = 1024  # likeliest tokens that top-p looks at before it sorts a vocabulary
UNITS = 2**30  # of a probability of 1, see in_units


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
        self.largest_k = max(row.top_k for row in rows)
        self.with_top_p = any(row.top_p < 1 for row in rows)

    def mask(self, logprobs: Float[Tensor, "L V"], rows: Int[Tensor, " L"]) -> Bool[Tensor, "L V"]:
        """The tokens that some rows may draw from their distributions, always the likeliest one.

        Example:
            >>> filters = RowFilters([Sampling(top_p=0.7), Sampling(top_k=1)], torch.device("cpu"))
            >>> filters.mask(torch.tensor([[0.5, 0.3, 0.2]] * 2).log(), torch.tensor([0, 1])).tolist()
            [[True, True, False], [True, False, False]]
        """
        floor = logprobs.amax(-1, keepdim=True) + self.min_p[rows].log()
        if self.largest_k:
            top_k = self.top_k[rows]
            largest = logprobs.topk(min(self.largest_k, logprobs.shape[-1]), -1).values
            kth = largest.gather(1, (top_k - 1).clamp(0, largest.shape[-1] - 1))
            floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
        kept = logprobs >= floor
        return _nucleus(logprobs.masked_fill(~kept, -torch.inf), self.top_p[rows]) if self.with_top_p else kept


def in_units(mass: Float[Tensor, "L V"]) -> Int[Tensor, "L V"]:
    """Probabilities as integer multiples of 2^-30, in the memory of the given ones, because a vocabulary is large.

    Their sums are exact, so that a draw depends neither on the order in which a device adds nor on the other rows. On
    CUDA a cumsum of floats depends on both, and raises under ``torch.use_deterministic_algorithms``.

    Example:
        >>> in_units(torch.tensor([[0.75, 0.25]])).tolist() == [[3 * 2**28, 2**28]]
        True
    """
    whole = torch.int32 if mass.dtype == torch.float32 else torch.int64
    return mass.view(whole).copy_(mass.mul_(UNITS).round_())


def _nucleus(scores: Float[Tensor, "L V"], top_p: Float[Tensor, "L 1"]) -> Bool[Tensor, "L V"]:
    """The fewest tokens, likeliest first, that have a share of the mass; where it is 1, all that have any.

    Only rows whose share is not within the likeliest tokens are sorted whole, each by itself, so that what a row keeps
    depends on no other row.
    """
    limited = top_p < 1
    mass = scores.softmax(-1)
    likeliest, order = mass.topk(min(CANDIDATES, mass.shape[-1]), -1)
    kept = _until(likeliest, order, top_p, mass.shape[-1])
    beyond = ((likeliest.sum(-1, keepdim=True) < top_p) & limited)[:, 0].nonzero()[:, 0]
    if len(beyond) and likeliest.shape[-1] < mass.shape[-1]:
        kept[beyond] = _until(*mass[beyond].sort(-1, descending=True), top_p[beyond], mass.shape[-1])
    return torch.where(limited, kept, scores > -torch.inf)


def _until(
    mass: Float[Tensor, "L K"], order: Int[Tensor, "L K"], share: Float[Tensor, "L 1"], vocabulary: int
) -> Tensor:
    """Tokens of descending mass, as long as those before have less than a share; the first always."""
    units = in_units(mass.clone())
    kept = (units.cumsum(-1) - units < share.double() * UNITS) & (mass > 0)
    kept[:, 0] = True
    return torch.zeros(len(mass), vocabulary, dtype=torch.bool, device=mass.device).scatter_(1, order, kept)
