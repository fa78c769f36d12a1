"""Expert routes, sampling masks and likeliest tokens of the transformers engine."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.policy.sampling_mask import to_bits
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS


class DecodeExtras:
    """Expert routes, sampling masks and likeliest tokens of one decode.

    They are kept on the CPU because they are as large as the rollout.

    A token is forwarded one step after it was sampled, and the last token of a response never is: its route is 0.

    Args:
        rows: Number of requests.
        max_tokens: Maximum number of tokens of a response.
        take_routes: Function that returns the expert routes of the last forward, [N, R, k]; None to record none.
        with_mask: True to record sampling masks.
        top_tokens: Number of likeliest tokens to record; None for all.
    """

    def __init__(
        self,
        rows: int,
        max_tokens: int,
        *,
        take_routes: Callable[[], Tensor] | None,
        with_mask: bool,
        top_tokens: int | None = 0,
    ) -> None:
        self.shape = rows, max_tokens
        self.take_routes, self.with_mask, self.top_tokens = take_routes, with_mask, top_tokens
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
            self._write(SAMPLING_MASK, rows, to_bits(mask), step)

    def add_top(
        self, rows: Int[Tensor, " L"], alive: Bool[Tensor, " L"], logprobs: Float[Tensor, "L V"], step: int
    ) -> None:
        """Record the likeliest tokens of a step, or all in the order of their ids, for the rows that are alive."""
        if self.top_tokens != 0:
            top, vocabulary = logprobs[alive], logprobs.shape[-1]
            ids = torch.arange(vocabulary, device=top.device).expand_as(top)
            if self.top_tokens is not None:
                top, ids = top.topk(min(self.top_tokens, vocabulary), -1)
            self._write(TOP_IDS, rows[alive], ids.to(torch.int32), step)
            self._write(TOP_LOGPROBS, rows[alive], top, step)

    def _write(self, name: str, rows: Int[Tensor, " L"], values: Tensor, step: int) -> None:
        if name not in self.tokens:
            self.tokens[name] = torch.zeros(*self.shape, *values.shape[1:], dtype=values.dtype)
        self.tokens[name][rows.cpu(), step] = values.cpu()

    def of_tokens(self, row: int, length: int) -> dict[str, Tensor]:
        """Return the extras of the response of a row."""
        return {name: tensor[row, :length].clone() for name, tensor in self.tokens.items()}

    def of_prompt(self, row: int) -> dict[str, Tensor]:
        """Return the extras of the prompt of a row."""
        return {ROUTES: self.prompts[row]} if self.prompts else {}
