"""Returns and advantages over the valid tokens of each row. A masked token is not a time step."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.utils.arguments import check_numbers


def check_decay(**decays: Any) -> None:
    """Raise a ValueError that names a decay outside [0, 1]."""
    check_numbers(at_least=0, at_most=1, **decays)


def discounted_returns(
    rewards: Float[Tensor, "B T"], valid_tokens: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    r"""Return the discounted reward from each valid token on, :math:`G_t = r_t + \gamma G_{t+1}`; 0 at masked tokens.

    Masked tokens have no reward and no discount.

    Source: Williams 1992; over masked tokens as Hu et al. 2025 (REINFORCE++), arXiv:2501.03262.

    Args:
        rewards: Shaped reward of each token, shape [B, T].
        valid_tokens: Mask of the time steps, shape [B, T].
        gamma: Discount of a step, in [0, 1].

    Raises:
        ValueError: If ``gamma`` is outside [0, 1].

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
    r"""Return generalized advantage estimates over the valid tokens of each row.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}

    Masked tokens are skipped without discount and have advantage 0. The value after the last valid token is 0 unless
    ``bootstrap`` is passed. The returns are ``advantages + values``.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards: Shaped reward of each token, shape [B, T].
        values: Value of the critic before each token, shape [B, T].
        valid_tokens: Mask of the time steps, shape [B, T].
        gamma: Discount of a step, in [0, 1].
        lam: Decay of later temporal differences, in [0, 1]; a scalar, or one per row, shape [B].
        bootstrap: Value after the last valid token, for truncated rows, shape [B].

    Raises:
        ValueError: If ``gamma`` or ``lam`` is outside [0, 1].
    """
    check_decay(gamma=gamma, **({} if isinstance(lam, Tensor) else {"lam": lam}))
    values = values.to(torch.promote_types(rewards.dtype, values.dtype))
    lengths = valid_tokens.sum(-1, keepdim=True)
    width = max(lengths.flatten().tolist(), default=0)
    steps = torch.arange(width, 0, -1, device=values.device) <= lengths  # valid tokens side by side, at the right

    def at_right(tokens: Tensor) -> Tensor:
        return tokens.new_zeros(steps.shape).masked_scatter(steps, tokens[valid_tokens])

    reward, value = at_right(rewards), at_right(values)
    advantages = torch.zeros_like(value)
    running = values.new_zeros(len(values))
    following = running if bootstrap is None else bootstrap
    for step in reversed(range(width)):
        delta = reward[:, step] + gamma * following - value[:, step]
        running = delta + gamma * lam * running
        following = value[:, step]
        advantages[:, step] = running
    return torch.zeros_like(values).masked_scatter(valid_tokens, advantages[steps])


class TurnEstimates(NamedTuple):
    """Advantage and return of a turn at each of its valid tokens, 0 elsewhere; shapes [B, T]."""

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
    """Return generalized advantage estimates with turns as time steps.

    The reward of a turn is the sum over its valid tokens, and its value is the critic's before the first of them. All
    valid tokens of a turn have its advantage and return. Tokens between turns, such as a tool's output, and turns
    without a valid token are not steps.

    Source: Zhou et al. 2024 (ArCHer), arXiv:2402.19446, whose upper level takes an utterance for an action; GAE as
    Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards: Shaped reward of each token, shape [B, T].
        values: Value of the critic before each token, shape [B, T].
        valid_tokens: Mask of tokens that train, shape [B, T].
        turns: Turn index of each valid token, increasing along a row, shape [B, T]; ignored at other tokens.
        gamma: Discount of a turn, in [0, 1].
        lam: Decay of later temporal differences, in [0, 1]; a scalar, or one per row, shape [B].
        bootstrap: Value after the last turn, for truncated rows, shape [B].

    Raises:
        ValueError: If ``gamma`` or ``lam`` is outside [0, 1].

    Example:
        >>> valid, turns = torch.tensor([[True, True, False, True]]), torch.tensor([[1, 1, 0, 2]])
        >>> rewards, values = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 9.0, 0.25]])
        >>> turn_gae(rewards, values, valid, turns, lam=0.0).advantages
        tensor([[-0.2500, -0.2500,  0.0000,  0.7500]])
    """
    starts = turn_starts(valid_tokens, turns)
    place = (starts.cumsum(-1) - 1).clamp(min=0)  # index of each token's turn in its row
    steps = torch.arange(valid_tokens.shape[1], device=place.device) < starts.sum(-1, keepdim=True)

    def by_turn(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros_like(tokens).scatter_add(1, place, masked_fill_invalid(tokens, mask))

    at_turns = by_turn(values, starts)
    advantages = gae(by_turn(rewards, valid_tokens), at_turns, steps, gamma=gamma, lam=lam, bootstrap=bootstrap)
    spread = (masked_fill_invalid(one.gather(1, place), valid_tokens) for one in (advantages, advantages + at_turns))
    return TurnEstimates(*spread)


def turn_starts(valid_tokens: Bool[Tensor, "B T"], turns: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return a mask of the first valid token of each turn.

    Example:
        >>> turn_starts(torch.tensor([[False, True, True, False, True]]), torch.tensor([[1, 1, 1, 0, 2]]))
        tensor([[False,  True, False, False,  True]])
    """
    lowest = torch.iinfo(turns.dtype).min
    latest = torch.where(valid_tokens, turns, lowest).cummax(-1).values
    before = torch.nn.functional.pad(latest, (1, 0), value=lowest)[:, :-1]
    return valid_tokens & ((latest > before) | (before == lowest))
