"""Shaped reward of each token from scores per row and rewards per token."""

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
    r"""Return the shaped reward of each token: its own reward, plus the row's score at the last valid token.

    .. math:: r_{b,t} = \text{token}_{b,t} + s_b\,[t = \text{last valid token of } b]

    The sum over the valid tokens of a row is its score plus its token rewards. Rows without valid tokens get zeros.
    With ``turn_rewards``, these parts of the score are placed at their tokens and the rest at the last valid token.

    Args:
        scores: Score of each row (task reward and bonuses), shape [B].
        token_rewards: Penalties and bonuses of single tokens, shape [B, T], or None.
        valid_tokens: Mask of tokens that train, shape [B, T].
        turn_rewards: Parts of the score at the tokens that earned them, shape [B, T]; None to place all at the end.

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
