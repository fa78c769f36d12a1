"""From scalar rewards and per-token rewards to the shaped reward of each token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.signal.masked import last_true, masked_fill_invalid


def shaped_rewards(
    scores: Float[Tensor, " B"],
    token_rewards: Float[Tensor, "B T"] | None,
    valid_tokens: Bool[Tensor, "B T"],
    turn_rewards: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    r"""The reward of each token: its own, plus the row's scalar at the last valid token.

    .. math:: r_{b,t} = \text{token}_{b,t} + s_b\,[t = \text{last valid token of } b]

    Nothing is lost or counted twice: the sum over the valid tokens of a row is its scalar plus its token rewards. A
    row without valid tokens gets zeros. What of the scalar was earned in turns can stand where it was earned instead
    of at the end; the sum stays. The result is a new tensor; the arguments stay raw.

    Args:
        scores: one scalar for each row (task reward and bonuses), shape [B].
        token_rewards: penalties and bonuses of single tokens, shape [B, T], or None.
        valid_tokens: the tokens that train, shape [B, T].
        turn_rewards: parts of the scalar at the tokens that earned them, shape [B, T]; None for all of it at the end.

    Example:
        >>> shaped_rewards(torch.tensor([1.0]), torch.tensor([[-0.1, -0.2, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([[-0.1000,  0.8000,  0.0000]])
        >>> turns = torch.tensor([[0.25, 0.0, 0.5]])
        >>> shaped_rewards(torch.tensor([1.0]), None, torch.tensor([[True, True, True]]), turns)
        tensor([[0.2500, 0.0000, 0.7500]])
    """
    parts = None if turn_rewards is None else masked_fill_invalid(turn_rewards.to(scores.dtype), valid_tokens)
    rest = scores if parts is None else scores - parts.sum(-1)
    scalar = torch.where(last_true(valid_tokens), rest[:, None], 0.0)
    if parts is not None:
        scalar = parts + scalar
    if token_rewards is None:
        return scalar
    return masked_fill_invalid(token_rewards, valid_tokens) + scalar
