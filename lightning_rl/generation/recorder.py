"""Recorder: what a decode of the transformers engine writes down about its tokens besides log-probabilities."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_rl.policy.sampling_mask import to_bits
from lightning_rl.rollout import ROUTES, SAMPLING_MASK


class Recorder:
    """The notes of one decode, on the CPU: they are as large as the rollout and no forward needs them.

    A token is forwarded one step after it was drawn, and the last one of a response never is: its route is 0.

    Args:
        rows: number of requests.
        longest: most tokens that one may draw.
        routes: returns the expert routes of the last forward, [N, R, k]; None to record none.
        kept: whether to record the tokens that a filter has kept.
    """

    def __init__(self, rows: int, longest: int, *, routes: Callable[[], Tensor] | None, kept: bool) -> None:
        self.rows, self.longest = rows, longest
        self.taken, self.keeps = routes, kept
        self.tokens: dict[str, Tensor] = {}
        self.prompts: list[Tensor] = []

    def prefilled(self, real: Bool[Tensor, "N P"], index: Int[Tensor, " B"]) -> None:
        """After the forward of the different prompts, padded on the left; ``index`` says which one is each row's."""
        if self.taken is None:
            return
        routes = self.taken().unflatten(0, real.shape).cpu()
        prompts = [row[mask] for row, mask in zip(routes, real.cpu(), strict=True)]
        self.prompts = [prompts[number] for number in index.tolist()]

    def forwarded(self, rows: Int[Tensor, " L"], alive: Bool[Tensor, " L"], step: int) -> None:
        """After the forward of the tokens that were drawn at a step, for the rows that go on."""
        if self.taken is not None:
            self._write(ROUTES, rows[alive], step, self.taken()[alive])

    def sampled(self, rows: Int[Tensor, " L"], step: int, kept: Bool[Tensor, "L V"]) -> None:
        """The tokens that each row could draw at a step."""
        if self.keeps:
            self._write(SAMPLING_MASK, rows, step, to_bits(kept))

    def _write(self, name: str, rows: Tensor, step: int, values: Tensor) -> None:
        if name not in self.tokens:
            self.tokens[name] = torch.zeros(self.rows, self.longest, *values.shape[1:], dtype=values.dtype)
        self.tokens[name][rows.cpu(), step] = values.cpu()

    def of_tokens(self, row: int, length: int) -> dict[str, Tensor]:
        """What was recorded about the response of a row."""
        if self.taken is not None and ROUTES not in self.tokens:  # no row went beyond its first token
            self.tokens[ROUTES] = torch.zeros(self.rows, self.longest, *self.prompts[0].shape[1:], dtype=torch.int16)
        return {name: tensor[row, :length].clone() for name, tensor in self.tokens.items()}

    def of_prompt(self, row: int) -> dict[str, Tensor]:
        """What was recorded about the prompt of a row."""
        return {ROUTES: self.prompts[row]} if self.prompts else {}
