r"""Bets against an engine that draws tokens from the policy's distribution, with a mean of at most 1 if it does.

The place of a token in the cumulative distribution is uniform in [0, 1], after any other tokens and in any order of the
vocabulary. A token covers an interval of places, so a bet on places pays its mean over the interval. The product of the
payments over tokens is the likelihood ratio of another engine, whose chance to exceed x is at most 1/x (Ville 1939).

Source: the probability integral transform (Rosenblatt 1952); tests by betting: Shafer 2021, "Testing by betting".
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

ORDERS = ("in the order of the vocabulary", "from the likeliest on")
BOUNDS = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)  # share of the distribution that an engine draws from
STAKES = (0.1, 0.3, 0.9)  # share of its tokens
PLACES = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 2**31), (0, 2**31))  # in the response
KINDS = ("repeat the prompt or response", "repeat the response", "end the response")
TILTS = (-1.0, -0.3, -0.1, 0.1, 0.3, 1.0, 3.0)  # nats that tokens of a kind lose
SIDES = ("the first", "the last")
NEVER = 2**31  # place after every response


def _name(order: str, side: str, bound: float, _stake: float, place: tuple[int, int]) -> str:
    begin, end = place
    where = "all tokens" if end - begin == 2**31 else f"token {begin + 1}" + (" and later" if end - begin > 1 else "")
    share = bound if side == SIDES[0] else 1 - bound
    return f"too often among {side} {share:.3g} of the probability, {order}, at {where}"


WAGERS = (
    *(_name(*parts) for parts in product(ORDERS, SIDES, BOUNDS, STAKES, PLACES)),
    *(f"that {kind} too {'seldom' if tilt > 0 else 'often'}" for kind in KINDS for tilt in TILTS),
)
"""Descriptions of the tokens of the other engines."""


def bet(quantiles: Tensor, places: Tensor, tolerance: float) -> Tensor:
    """Return the log-likelihood ratios of engines that draw from one side of the distribution.

    Args:
        quantiles: Begin and end of the interval of each token in each order, [2, 2, N].
        places: Place of each token in its response, [N].
        tolerance: Allowed difference of a log-probability in nats.
    """
    begin, end = quantiles[:, 0, None], quantiles[:, 1, None]  # [2, 1, N]
    length, bounds = (end - begin).clamp(min=1e-300), torch.tensor(BOUNDS, dtype=torch.float64)[:, None]
    below = (end.minimum(bounds) - begin.minimum(bounds)) / length / bounds
    above = (end.maximum(bounds) - begin.maximum(bounds)) / length / (1 - bounds)
    paid, stakes = torch.stack([below, above], 1)[:, :, :, None], torch.tensor(STAKES, dtype=torch.float64)[:, None]
    logs = torch.log1p(stakes * (paid - 1)) - 2 * stakes * math.expm1(tolerance)
    first, last = torch.tensor(PLACES).unbind(1)
    inside = (places[:, None] >= first) & (places[:, None] < last)
    return (logs @ inside.to(logs.dtype)).flatten()


def owners_of(samples: Sequence[Sequence[int]]) -> Tensor:
    """Return the number of the sample of each token of samples, [N]."""
    return torch.arange(len(samples)).repeat_interleave(torch.tensor([len(tokens) for tokens in samples]))


def places_of(samples: Sequence[Sequence[int]]) -> Tensor:
    """Return the place of each token of samples in its sample, [N]."""
    return torch.tensor([place for tokens in samples for place in range(len(tokens))], dtype=torch.int64)


def kinds_of(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[int]], probabilities: Tensor, ends: Sequence[int]
) -> Tensor:
    """Return the probability of each of :data:`KINDS` before a token, and 1 where the token is of it, [3, 2, N].

    Args:
        prompts: Tokens before each response.
        samples: Tokens of each response, N in total.
        probabilities: Distribution of each token, [N, V].
        ends: Tokens that end a response.
    """
    owners, places, parts = owners_of(samples), places_of(samples), list[Tensor]()
    for kind in range(len(KINDS)):
        begins, drawn = list[dict[int, int]](), list[bool]()  # of each token, the place from which on it is of the kind
        for prompt, tokens in zip(prompts, samples, strict=True):
            begin, known = dict[int, int](), ([*prompt, *tokens], tokens, ends)[kind]
            for place, token in enumerate(known, len(tokens) - len(known)):
                begin.setdefault(token, -1 if known is ends else place)
            begins.append(begin)
            drawn += [begin.get(token, place) < place for place, token in enumerate(tokens)]
        most = max(map(len, begins))
        ids = torch.tensor([[*begin, *[0] * (most - len(begin))] for begin in begins], dtype=torch.int64)
        since = torch.tensor([[*begin.values(), *[NEVER] * (most - len(begin))] for begin in begins])
        mass = (probabilities.gather(1, ids[owners]) * (since[owners] < places[:, None])).sum(-1)
        parts.append(torch.stack([mass.clamp(max=1.0), torch.tensor(drawn, dtype=mass.dtype)]))
    return torch.stack(parts)


def bet_on_kinds(kinds: Tensor, tolerance: float) -> Tensor:
    """Return the log-likelihood ratios of engines that make tokens of a kind less likely.

    Args:
        kinds: Result of :func:`kinds_of`, [3, 2, N].
        tolerance: Allowed difference of a log-probability in nats.
    """
    tilts = torch.tensor(TILTS, dtype=torch.float64)[:, None]
    mass, drawn = kinds[:, 0, None], kinds[:, 1, None]
    total = 1 + mass * torch.expm1(-tilts)
    slack = 2 * mass * (1 - mass) * torch.expm1(-tilts).abs() / total * math.expm1(tolerance)
    return (-tilts * drawn - total.log() - slack).sum(-1).flatten()
