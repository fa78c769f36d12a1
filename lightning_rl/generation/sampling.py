"""Sampling: how tokens are drawn, one value for the rollouts that train and for every evaluation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
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
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"expected top_k to be a whole number, 0 for no limit, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"expected min_p in [0, 1), got {self.min_p}")
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens to be a whole number above 0, got {self.max_new_tokens!r}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(sorted(set(self.eos_token_ids))))

    @property
    def filters(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


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
