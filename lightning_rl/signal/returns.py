"""Returns and advantages of single tokens, along the valid tokens of each row. A masked token is no time step."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.arguments import check_numbers
from lightning_rl.signal.masked import masked_fill_invalid


def check_decay(**decays: Any) -> None:
    """Raises a ValueError that names a decay outside [0, 1]."""
    check_numbers(at_least=0, at_most=1, **decays)


def discounted_returns(
    rewards: Float[Tensor, "B T"], valid_tokens: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    r"""The discounted reward from each valid token on, :math:`G_t = r_t + \gamma G_{t+1}`; 0 at masked tokens.

    A masked token carries neither reward nor discount: the return passes through it.

    Source: Williams 1992; over masked tokens as Hu et al. 2025 (REINFORCE++), arXiv:2501.03262.

    Args:
        rewards: shaped reward of each token, shape [B, T].
        valid_tokens: the time steps, shape [B, T].
        gamma: discount of a step, in [0, 1].

    Raises:
        ValueError: if ``gamma`` leaves [0, 1].

    Example:
        >>> valid = torch.tensor([[True, False, True]])
        >>> discounted_returns(torch.tensor([[1.0, 7.0, 2.0]]), valid, gamma=0.5)
        tensor([[2., 0., 2.]])
    """
    check_decay(gamma=gamma)
    return gae(rewards, torch.zeros_like(rewards), valid_tokens, gamma=gamma)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    r"""Generalised advantage estimation along the valid tokens of each row.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}

    A masked token is no time step: value and running sum pass through it undiscounted, and its own advantage is 0. The
    value after the last valid token is 0 unless ``bootstrap`` gives one. The returns are ``advantages + values``.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards: shaped reward of each token, shape [B, T].
        values: the critic's value before each token, shape [B, T].
        valid_tokens: the time steps, shape [B, T].
        gamma: discount of a step, in [0, 1].
        lam: decay of later temporal differences, in [0, 1].
        bootstrap: value after the last valid token, of a row that was cut off; shape [B].

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].
    """
    check_decay(gamma=gamma, lam=lam)
    rewards, values = masked_fill_invalid(rewards, valid_tokens), masked_fill_invalid(values, valid_tokens)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    following = running if bootstrap is None else bootstrap
    for step in reversed(range(values.shape[1])):
        valid = valid_tokens[:, step]
        delta = rewards[:, step] + gamma * following - values[:, step]
        running = torch.where(valid, delta + gamma * lam * running, running)
        following = torch.where(valid, values[:, step], following)
        advantages[:, step] = torch.where(valid, running, 0.0)
    return advantages
