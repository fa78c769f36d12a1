"""Returns and advantages of single tokens, along the valid tokens of each row. A masked token is no time step."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
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
    lam: float | Float[Tensor, " B"] = 1.0,
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
        lam: decay of later temporal differences, in [0, 1]; of all rows, or of each, shape [B].
        bootstrap: value after the last valid token, of a row that was cut off; shape [B].

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].
    """
    check_decay(gamma=gamma, **({} if isinstance(lam, Tensor) else {"lam": lam}))
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


class TurnEstimates(NamedTuple):
    """What a turn is worth, at each of its valid tokens and 0 elsewhere; shapes [B, T]."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]


def turn_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    valid_tokens: Bool[Tensor, "B T"],
    turns: Int[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"] = 1.0,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> TurnEstimates:
    r"""Generalised advantage estimation whose time steps are turns.

    The reward of a turn is the sum over its valid tokens, its value the critic's before the first of them. All valid
    tokens of a turn have its advantage and its return. What lies between turns, such as a tool's answer, is no step,
    and neither is a turn without a valid token.

    Source: Zhou et al. 2024 (ArCHer), arXiv:2402.19446, whose upper level takes an utterance for an action; GAE as
    Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards: shaped reward of each token, shape [B, T].
        values: the critic's value before each token, shape [B, T].
        valid_tokens: the tokens that train, shape [B, T].
        turns: number of the turn that drew each token, rising along a row; what stands at other tokens plays no part.
        gamma: discount of a turn, in [0, 1].
        lam: decay of later temporal differences, in [0, 1]; of all rows, or of each, shape [B].
        bootstrap: value after the last turn, of a row that was cut off; shape [B].

    Raises:
        ValueError: if ``gamma`` or ``lam`` leaves [0, 1].

    Example:
        >>> valid, turns = torch.tensor([[True, True, False, True]]), torch.tensor([[1, 1, 0, 2]])
        >>> rewards, values = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 9.0, 0.25]])
        >>> turn_gae(rewards, values, valid, turns, lam=0.0).advantages
        tensor([[-0.2500, -0.2500,  0.0000,  0.7500]])
    """
    starts = turn_starts(valid_tokens, turns)
    place = (starts.cumsum(-1) - 1).clamp(min=0)  # of a token's turn in its row
    steps = torch.arange(valid_tokens.shape[1], device=place.device) < starts.sum(-1, keepdim=True)

    def by_turn(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros_like(tokens).scatter_add(1, place, masked_fill_invalid(tokens, mask))

    at_turns = by_turn(values, starts)
    advantages = gae(by_turn(rewards, valid_tokens), at_turns, steps, gamma=gamma, lam=lam, bootstrap=bootstrap)
    spread = (masked_fill_invalid(one.gather(1, place), valid_tokens) for one in (advantages, advantages + at_turns))
    return TurnEstimates(*spread)


def turn_starts(valid_tokens: Bool[Tensor, "B T"], turns: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Marks the first valid token of each turn.

    Example:
        >>> turn_starts(torch.tensor([[False, True, True, False, True]]), torch.tensor([[1, 1, 1, 0, 2]]))
        tensor([[False,  True, False, False,  True]])
    """
    nobody = torch.iinfo(turns.dtype).min
    so_far = torch.where(valid_tokens, turns, nobody).cummax(-1).values
    before = torch.nn.functional.pad(so_far, (1, 0), value=nobody)[:, :-1]
    return valid_tokens & ((so_far > before) | (before == nobody))
