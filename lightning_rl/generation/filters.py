"""Filters: which tokens a request may draw, by top-k, top-p and min-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilter:
    """What is left of the distribution at the sampling temperature; greedy requests are never filtered.

    Applied in the order min-p, top-k, top-p, each to what the one before has left.

    Args:
        top_k: how many of the likeliest tokens are kept, and all that are as likely as the last of them; 0 keeps all.
        top_p: the least probability mass that is kept, likeliest first, in (0, 1]; 1 keeps all.
        min_p: tokens below this share of the highest probability are dropped, in [0, 1); 0 keeps all.

    Raises:
        ValueError: if an option is out of range.

    Example:
        >>> bool(TokenFilter()), bool(TokenFilter(top_p=0.9))
        (False, True)
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"expected top_k to be a whole number, 0 for no limit, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"expected min_p in [0, 1), got {self.min_p}")

    def __bool__(self) -> bool:
        """Whether it drops anything."""
        return self != NO_FILTER


NO_FILTER = TokenFilter()


class RowFilters:
    """The filters of several rows, as tensors.

    Args:
        filters: one for each row; all of them may differ.
        device: of the log-probabilities that they will see.
    """

    def __init__(self, filters: Sequence[TokenFilter], device: torch.device) -> None:
        self.top_k = torch.tensor([row.top_k for row in filters], device=device)[:, None]
        self.top_p = torch.tensor([row.top_p for row in filters], device=device)[:, None]
        self.min_p = torch.tensor([row.min_p for row in filters], device=device)[:, None]

    def kept(self, logprobs: Float[Tensor, "L V"], rows: Int[Tensor, " L"]) -> Bool[Tensor, "L V"]:
        """The tokens that the filters of some rows keep of their distributions, always the likeliest one.

        Example:
            >>> filters = RowFilters([TokenFilter(top_p=0.7), TokenFilter(top_k=1)], torch.device("cpu"))
            >>> filters.kept(torch.tensor([[0.5, 0.3, 0.2]] * 2).log(), torch.tensor([0, 1])).tolist()
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
