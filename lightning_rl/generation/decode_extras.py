"""Expert routes and sampling masks of the transformers engine."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_rl.policy.sampling_mask import to_bits
from lightning_rl.rollout import ROUTES, SAMPLING_MASK


class DecodeExtras:
    """Expert routes and sampling masks of one decode, kept on the CPU because they are as large as the rollout.

    A token is forwarded one step after it was sampled, and the last token of a response never is: its route is 0.

    Args:
        rows: Number of requests.
        max_tokens: Maximum number of tokens of a response.
        take_routes: Function that returns the expert routes of the last forward, [N, R, k]; None to record none.
        with_mask: True to record sampling masks.
    """

    def __init__(self, rows: int, max_tokens: int, *, take_routes: Callable[[], Tensor] | None, with_mask: bool):
        self.shape = rows, max_tokens
        self.take_routes, self.with_mask = take_routes, with_mask
        self.tokens: dict[str, Tensor] = {}
        self.prompts: list[Tensor] = []

    def add_prompts(self, real: Bool[Tensor, "N P"], index: Int[Tensor, " B"]) -> None:
        """Record the routes of the distinct, left-padded prompts; ``index`` maps rows to prompts."""
        if self.take_routes is not None:
            routes = self.take_routes().unflatten(0, real.shape).cpu()
            prompts = [row[mask] for row, mask in zip(routes, real.cpu(), strict=True)]
            self.prompts = [prompts[number] for number in index.tolist()]
            self.tokens[ROUTES] = torch.zeros(*self.shape, *routes.shape[2:], dtype=routes.dtype)

    def add_routes(self, rows: Int[Tensor, " L"], alive: Bool[Tensor, " L"], step: int) -> None:
        """Record the routes of the tokens of a step after their forward, for the rows that are alive."""
        if self.take_routes is not None:
            self.tokens[ROUTES][rows[alive].cpu(), step] = self.take_routes()[alive].cpu()

    def add_mask(self, rows: Int[Tensor, " L"], mask: Bool[Tensor, "L V"], step: int) -> None:
        """Record the tokens that each row could sample at a step."""
        if self.with_mask:
            bits = to_bits(mask).cpu()
            if SAMPLING_MASK not in self.tokens:
                self.tokens[SAMPLING_MASK] = torch.zeros(*self.shape, bits.shape[-1], dtype=bits.dtype)
            self.tokens[SAMPLING_MASK][rows.cpu(), step] = bits

    def of_tokens(self, row: int, length: int) -> dict[str, Tensor]:
        """Return the extras of the response of a row."""
        return {name: tensor[row, :length].clone() for name, tensor in self.tokens.items()}

    def of_prompt(self, row: int) -> dict[str, Tensor]:
        """Return the extras of the prompt of a row."""
        return {ROUTES: self.prompts[row]} if self.prompts else {}
