"""From scalar rewards and per-token rewards to the shaped reward of each token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.signal.masked import last_true, masked_fill_invalid


def shaped_rewards(
    scores: Float[Tensor, " B"],
    token_rewards: Float[Tensor, "B T"] | None,
    valid_tokens: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    r"""The reward of each token: its own, plus the row's scalar at the last valid token.

    .. math:: r_{b,t} = \text{token}_{b,t} + s_b\,[t = \text{last valid token of } b]

    Nothing is lost or counted twice: the sum over the valid tokens of a row is its scalar plus its token rewards. A
    row without valid tokens gets zeros. The result is a new tensor; the arguments stay raw.

    Args:
        scores: one scalar for each row (task reward and bonuses), shape [B].
        token_rewards: penalties and bonuses of single tokens, shape [B, T], or None.
        valid_tokens: the tokens that train, shape [B, T].

    Example:
        >>> shaped_rewards(torch.tensor([1.0]), torch.tensor([[-0.1, -0.2, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([[-0.1000,  0.8000,  0.0000]])
    """
    scalar = torch.where(last_true(valid_tokens), scores[:, None], 0.0)
    if token_rewards is None:
        return scalar
    return masked_fill_invalid(token_rewards, valid_tokens) + scalar
