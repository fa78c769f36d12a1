"""A few sampled completions scored by the policy's own forward, and summaries of earlier rollouts.

They are chosen by id only, before any filter, since a choice by length or reward would bias the likelihood.
"""

import math
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, takewhile
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.audit.token_bets import WAGERS, bet, bet_on_kinds, kinds_of, owners_of, places_of
from lightning_rl.generation import Completion, Request, SamplingParams
from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.rollout import SAMPLING_MASK, FinishReason
from lightning_rl.samples import Media
from lightning_rl.testing.properties.subsample import order_of

Pair = tuple[Request, Completion]
MIN_DRAWS, MAX_DRAWS, MAX_TOKENS = 4, 48, 48  # number of draws; scored tokens per draw
BUDGET, ALL_BUDGET = 384, 2048  # maximum number of sampled tokens and of all tokens
MAX_PROBABILITIES = 2**20  # of all tokens that are handled together
KEPT_ROLLOUTS, KEPT_ROWS = 8, 512
SHARES = (0.5, 0.1, 0.01, 0.001)  # of samples that are copies
NOISE_SHARES = (0.5, 0.2, 0.05)  # of tokens that are drawn with the noise of another rollout
NOISE_RATIOS = 3 * len(NOISE_SHARES)


class Draw(NamedTuple):
    """The first tokens of one sample under the weights that drew it.

    Attributes:
        sample: Id of the sample.
        place: Number of the batch and place in it.
        tokens: The tokens.
        quantiles: Begin and end of the interval of each token in the cumulative distribution, in the order of the
            vocabulary and from the likeliest token on, [2, 2, N].
        same_noise: Log-likelihood ratios of the kinds of noise of :func:`_noise_ratios`.
        kinds: Result of :func:`~lightning_rl.audit.token_bets.kinds_of`.
    """

    sample: int
    place: tuple[int, int] = (-1, -1)
    tokens: tuple[int, ...] = ()
    quantiles: Tensor = torch.zeros(2, 2, 0)
    same_noise: tuple[float, ...] = (0.0,) * NOISE_RATIOS
    kinds: Tensor = torch.zeros(3, 2, 0)


class Earlier(NamedTuple):
    """Summary of an earlier rollout.

    Attributes:
        number: Number of the rollout.
        samples: Ids of its samples.
        responses: Sampled tokens of these samples, in any order.
        odds: Result of :func:`odds_of`.
        repeated: Result of :func:`repeat_ratios`.
        seeds: Seeds of its requests.
        draws: Its draws.
    """

    number: int
    samples: Sequence[int]
    responses: Sequence[tuple[int, ...]]
    odds: Tensor = torch.zeros(len(WAGERS), dtype=torch.float64)
    repeated: tuple[tuple[float, ...], ...] = ((0.0,) * len(SHARES),) * 2
    seeds: Sequence[int] = ()
    draws: Sequence[Draw] = ()


class Repeat(NamedTuple):
    """Repeated beginning of a sample.

    Attributes:
        sample: Id of the sample.
        nats: Log-likelihood ratios of a copy of a response of the same prompt, and of an earlier rollout.
        known: True if the log-probabilities of its tokens are known.
    """

    sample: int
    nats: tuple[float, float] = (-math.inf, -math.inf)
    known: bool = True


def trained_pairs(batches: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Return requests and completions to train on in order: no greedy, aborted or empty ones."""
    return [pair for _, _, pair in _places_of(batches)]


def _places_of(batches: Sequence[Sequence[Pair]]) -> list[tuple[int, int, Pair]]:
    """Return :func:`trained_pairs` with the number of their batch and their place in it."""
    return [
        (number, place, (request, completion))
        for number, batch in enumerate(batches)
        for place, (request, completion) in enumerate(batch)
        if request.sampling.temperature > 0 and completion.finish is not FinishReason.ABORT and completion.token_ids
    ]


def turns_of(batches: Sequence[Sequence[Pair]]) -> dict[int, list[Pair]]:
    """Return requests and completions of each sample, turn by turn."""
    turns: dict[int, list[Pair]] = {}
    for batch in batches:
        for request, completion in batch:
            turns.setdefault(request.sample_id, []).append((request, completion))
    return turns


def response_of(turns: Sequence[Pair]) -> tuple[int, ...]:
    """Return the sampled tokens of all turns."""
    return tuple(token for _, completion in turns for token in completion.token_ids)


def repeats_of(batches: Sequence[Sequence[Pair]], earlier: Sequence[Earlier]) -> list[Repeat]:
    r"""Return how surprising it is that samples begin like others of their prompt, or of earlier rollouts.

    A sample begins with the first l tokens of a given one with the probability p of these tokens, so
    :math:`[\text{begins alike}] / p` has mean 1, and so has its average over m others and over l, with half of the
    weight at the whole response. That average is at least 1 / (2 p m) for a copy and 1 / (2 p m L) for a common
    beginning, where L is the number of tokens of the other sample.
    """
    before = sorted(tokens for rollout in earlier for tokens in rollout.responses)
    drawn, repeats = defaultdict[tuple[int, ...], list[tuple[int, ...]]](list), list[Repeat]()
    for sample, turns in turns_of([trained_pairs(batches)]).items():
        tokens, scores = response_of(turns), [each.logprobs for _, each in turns if each.logprobs is not None]
        own = drawn[turns[0][0].prefix_ids]
        if len(scores) == len(turns):
            surprises = list(accumulate((-score for part in scores for score in part.tolist()), initial=0.0))
            repeats.append(Repeat(sample, (_alike(tokens, own, surprises), _alike(tokens, before, surprises))))
        else:
            repeats.append(Repeat(sample, known=False))
        insort(own, tokens)
    return repeats


def _alike(tokens: tuple[int, ...], others: Sequence[tuple[int, ...]], surprises: Sequence[float]) -> float:
    """Return the log-likelihood ratio of a copy of the most similar of some sorted responses."""
    place, ratio = bisect(others, tokens), -math.inf
    for other in others[max(place - 1, 0) : place + 1]:
        shared = len(list(takewhile(bool, map(eq, tokens, other))))
        parts = 1 if shared == len(other) else len(other)
        ratio = max(ratio, surprises[shared] - math.log(2 * len(others) * parts) if shared else -math.inf)
    return ratio


def repeat_ratios(repeats: Sequence[Repeat]) -> tuple[tuple[float, ...], ...]:
    """Return the log-likelihood ratios of engines of which each of :data:`SHARES` are copies, by kind."""
    nats = torch.tensor([sample.nats for sample in repeats], dtype=torch.float64).reshape(-1, 2)
    ratios = [torch.logaddexp(nats + math.log(share), torch.tensor(math.log1p(-share))).sum(0) for share in SHARES]
    return tuple(map(tuple, torch.stack(ratios, 1).tolist()))


def earlier_of(
    number: int,
    batches: Sequence[Sequence[Pair]],
    draws: Sequence[Draw],
    repeats: Sequence[Repeat] = (),
    odds: Tensor | None = None,
) -> Earlier:
    """Return the summary of a rollout."""
    pairs = trained_pairs(batches)[:KEPT_ROWS]
    samples = turns_of([pairs])
    return Earlier(
        number,
        list(samples),
        sorted(map(response_of, samples.values())),  # sorted parts are fast to sort together
        torch.zeros(len(WAGERS), dtype=torch.float64) if odds is None else odds,
        repeat_ratios(repeats),
        [request.seed for request, _ in pairs],
        draws,
    )


def noise_ratios(draws: Sequence[Draw]) -> tuple[float, ...]:
    """Return the log-likelihood ratios of engines with the same noise in every rollout, over all draws."""
    return tuple(map(sum, zip(*(draw.same_noise for draw in draws), strict=True))) or (0.0,) * NOISE_RATIOS


def odds_of(draws: Sequence[Draw], tolerance: float, earlier: Sequence[Earlier] = ()) -> Tensor:
    """Return the log-likelihood ratio of each engine of :data:`~lightning_rl.audit.token_bets.WAGERS`, [W].

    It covers all draws since the latest audit at which it was below 0.
    """
    before = earlier[-1].odds.clamp(min=0.0) if earlier else torch.zeros(len(WAGERS), dtype=torch.float64)
    if not draws:
        return before
    places = torch.cat([torch.arange(draw.quantiles.shape[-1]) for draw in draws])
    quantiles, kinds = (torch.cat([getattr(draw, name) for draw in draws], -1) for name in ("quantiles", "kinds"))
    return before + torch.cat([bet(quantiles, places, tolerance), bet_on_kinds(kinds, tolerance)])


@torch.no_grad()
def score_draws(
    sampling: SamplingParams,
    logits_of: Callable[[Sequence[Sequence[int]], Sequence[Media | None]], Tensor | None],
    batches: Sequence[Sequence[Pair]],
    number: int,
    tolerance: float,
    *,
    earlier: Sequence[Earlier] = (),
    part: int = 1,
) -> list[Draw]:
    """Return a few fresh samples, 1/``part`` of the budget, scored by the policy's own forward.

    Empty if weights are sharded.

    Args:
        sampling: Sampling of the run.
        logits_of: Function from token ids, and the pictures of their beginnings, to the policy's logits after each of
            them; None if weights are sharded.
        batches: Requests and completions of this rollout by batch.
        number: Number of the rollout.
        tolerance: Mean difference in nats allowed between two computations of a log-probability.
        earlier: Summaries of earlier audited rollouts.
        part: Divisor of the budget.
    """
    placed = [one for one in _places_of(batches) if _is_fresh(one[2], number, sampling.filters)]
    placed.sort(key=lambda one: one[2][0].seed)  # random, independent of the completions
    again = sorted(range(len(placed)), key=lambda row: order_of(placed[row][1], placed[row][0]))  # as in other rollouts
    mixed = dict.fromkeys(row for pair in enumerate(again) for row in pair)
    placed = [placed[row] for row in mixed]
    placed = placed[: affordable_draws([pair for _, _, pair in placed], part)]
    few = [pair for _, _, pair in placed]
    before = {draw.place: draw for one in earlier[-1:] for draw in one.draws}
    ids = [[*request.prefix_ids, *completion.token_ids[:MAX_TOKENS]][:-1] for request, completion in few]
    logits = logits_of(ids, [request.media for request, _ in few]) if ids else None
    if logits is None:
        return []
    ends, draws = sorted(sampling.eos_token_ids or ()), list[Draw]()
    for rows in _parts_of(few, logits.shape[-1]):
        scores = _scores(logits[rows], few[rows])
        places = [(batch, place) for batch, place, _ in placed[rows]]
        draws += _draws(few[rows], scores, ends, tolerance, places, [before.get(place) for place in places])
    return draws


def affordable_draws(pairs: Sequence[Pair], part: int = 1) -> int:
    """Return the number of leading samples within 1/``part`` of the budget."""
    sampled = all_tokens = 0
    for number, (request, completion) in enumerate(pairs[:MAX_DRAWS]):
        if number >= MIN_DRAWS and (sampled >= BUDGET // part or all_tokens >= ALL_BUDGET // part):
            return number
        sampled += min(len(completion.token_ids), MAX_TOKENS)
        all_tokens += len(request.prefix_ids) + min(len(completion.token_ids), MAX_TOKENS)
    return min(len(pairs), MAX_DRAWS)


def _is_fresh(pair: Pair, number: int, filters: bool) -> bool:  # noqa: FBT001
    completion = pair[1]
    known = not filters or SAMPLING_MASK in completion.token_extras
    return known and set(completion.versions or (completion.version,)) == {number}


def _parts_of(pairs: Sequence[Pair], vocabulary: int) -> Iterator[slice]:
    """Yield parts of samples whose distributions are in memory together."""
    begin = size = 0
    for number, (_, completion) in enumerate(pairs):
        more = min(len(completion.token_ids), MAX_TOKENS) * vocabulary
        if size and size + more > MAX_PROBABILITIES:
            yield slice(begin, number)
            begin, size = number, 0
        size += more
    yield slice(begin, len(pairs))


def _scores(logits: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """Return the log-probabilities over the vocabulary at the first tokens of each sample, at its temperature, [N, V].

    Args:
        logits: Logits after each token, [b, T, V].
        pairs: Requests and completions.
    """
    parts = list[Tensor]()
    for row, (request, completion) in enumerate(pairs):
        begin, length = len(request.prefix_ids), min(len(completion.token_ids), MAX_TOKENS)
        parts.append(logits[row, begin - 1 : begin - 1 + length].double() / request.sampling.temperature)
        if SAMPLING_MASK in completion.token_extras:
            bits = completion.token_extras[SAMPLING_MASK][:length].to(logits.device)
            parts[-1] = parts[-1].masked_fill(~from_bits(bits, logits.shape[-1]), -torch.inf)
    return torch.cat(parts).log_softmax(-1).cpu()


def _draws(
    pairs: Sequence[Pair],
    scores: Tensor,
    ends: Sequence[int],
    tolerance: float,
    places: Sequence[tuple[int, int]],
    before: Sequence[Draw | None],
) -> list[Draw]:
    """Return draws of samples from the distributions of their tokens, [N, V], and the draws at their places before."""
    samples = [tuple(completion.token_ids[:MAX_TOKENS]) for _, completion in pairs]
    lengths, probabilities = [len(tokens) for tokens in samples], scores.exp()
    quantiles = quantiles_of(list(chain(*samples)), probabilities)
    kinds = kinds_of([request.prefix_ids for request, _ in pairs], samples, probabilities, ends)
    columns = zip(
        [request.sample_id for request, _ in pairs],
        places,
        samples,
        quantiles.split(lengths, -1),
        _noise_ratios(samples, scores, quantiles, before, tolerance),
        kinds.split(lengths, -1),
        strict=True,
    )
    return [Draw(*parts) for parts in columns]


def _sums(numbers: Tensor, samples: Sequence[Sequence[int]]) -> Tensor:
    """Return the sums of numbers of each token, [N, ...], over each sample, [D, ...]."""
    return numbers.new_zeros(len(samples), *numbers.shape[1:]).index_add_(0, owners_of(samples), numbers)


def quantiles_of(tokens: Sequence[int], probabilities: Tensor) -> Tensor:
    """Return the intervals of tokens in the cumulative distributions [N, V] before them, see :class:`Draw`."""
    places = torch.tensor(tokens, dtype=torch.int64)[:, None]
    own = probabilities.gather(1, places)
    earlier = torch.arange(probabilities.shape[1]) < places
    first = torch.stack([earlier, (probabilities > own) | (earlier & (probabilities == own))])
    begin = torch.where(first, probabilities, 0.0).sum(-1)
    return torch.stack([begin, begin + own[:, 0]], 1)


def _noise_ratios(
    samples: Sequence[Sequence[int]],
    scores: Tensor,
    quantiles: Tensor,
    before: Sequence[Draw | None],
    tolerance: float,
) -> list[tuple[float, ...]]:
    r"""Return the log-likelihood ratios of engines that draw some tokens of a sample with the noise of an earlier draw.

    Equal noise makes tokens equal, or intervals of the cumulative distribution overlap. A token equals a given one with
    its probability p, so :math:`[\text{equal}] / p` has mean 1 after any other tokens. So has the overlap of two
    intervals over the product of their lengths.
    """
    known = [one or Draw(-1) for one in before]
    shared = [tokens[: len(one.tokens)] for tokens, one in zip(samples, known, strict=True)]
    numbers = [len(tokens) for tokens in shared]
    inside = places_of(samples) < torch.tensor(numbers)[owners_of(samples)]
    ours, theirs = (
        torch.tensor(list(chain(*parts)), dtype=torch.int64)
        for parts in (shared, [one.tokens[:number] for one, number in zip(known, numbers, strict=True)])
    )
    least = scores[inside].gather(1, theirs[:, None])[:, 0]
    other = torch.cat([one.quantiles[..., :number].double() for one, number in zip(known, numbers, strict=True)], -1)
    one = quantiles[..., inside]
    overlap = (torch.minimum(one[:, 1], other[:, 1]) - torch.maximum(one[:, 0], other[:, 0])).clamp(min=0.0)
    lengths = (one[:, 1] - one[:, 0]) * (other[:, 1] - other[:, 0])
    gains = torch.cat([torch.where(ours == theirs, (-least).exp(), 0.0)[None], overlap / lengths.clamp(min=1e-300)])
    shares = torch.tensor(NOISE_SHARES, dtype=torch.float64)
    logs = (1 - shares + shares * (gains * math.exp(-tolerance))[..., None]).log()
    return list(map(tuple, _sums(logs.transpose(0, 1).flatten(1), shared).tolist()))
