"""A few sampled completions scored by the policy's own forward, and summaries of earlier rollouts.

They are chosen by id only, before any filter, since a choice by length or reward would bias the likelihood.
"""

import math
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_rl.audit.forwards import forwards_plainly
from lightning_rl.audit.subsample import order_of
from lightning_rl.audit.token_bets import WAGERS, bet, bet_on_kinds, kinds_of
from lightning_rl.generation import Completion, Request
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.rollout import SAMPLING_MASK, FinishReason

Pair = tuple[Request, Completion]
MIN_DRAWS, MAX_DRAWS, MAX_TOKENS = 4, 48, 48  # number of draws; scored tokens per draw
BUDGET, ALL_BUDGET = 384, 2048  # maximum number of sampled tokens and of all tokens
KEPT_ROLLOUTS, KEPT_ROWS = 8, 512
GREEDY_SHARE = 1 / 8  # of the samples of an engine that draws some of them greedily
SHARES = (0.5, 0.1, 0.01, 0.001)  # of samples that are copies
NOISE_SHARES = (0.5, 0.2, 0.05)  # of tokens that are drawn with the noise of another rollout
NOISE_RATIOS = 3 * len(NOISE_SHARES)
LEAST_TOKENS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # possible values of min_tokens


class Draw(NamedTuple):
    """The first tokens of one sample under the weights that drew it.

    Attributes:
        sample: Id of the sample.
        greedy: Log-likelihood ratio of an engine that draws some samples greedily.
        unended: Log-likelihood ratios of engines that end no sample before each of :data:`LEAST_TOKENS`.
        place: Number of the batch and place in it.
        tokens: The tokens.
        quantiles: Begin and end of the interval of each token in the cumulative distribution, in the order of the
            vocabulary and from the likeliest token on, [2, 2, N].
        same_noise: Result of :func:`_noise_ratios`.
        kinds: Result of :func:`~lightning_rl.audit.token_bets.kinds_of`.
    """

    sample: int
    greedy: float = 0.0
    unended: tuple[float, ...] = (0.0,) * len(LEAST_TOKENS)
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
        responses: Sampled tokens of these samples.
        odds: Result of :func:`odds_of`.
        likelier: Result of :func:`likelihood_ratios` of its draws.
        repeated: Result of :func:`repeat_ratios`.
        seeds: Seeds of its requests.
        draws: Its draws.
    """

    number: int
    samples: Sequence[int]
    responses: Sequence[tuple[int, ...]]
    odds: Tensor = torch.zeros(len(WAGERS), dtype=torch.float64)
    likelier: tuple[float, ...] = (0.0,) * (1 + len(LEAST_TOKENS))
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
            surprises = [0.0, *(-torch.cat(scores).double().cumsum(0)).tolist()]
            repeats.append(Repeat(sample, (_alike(tokens, own, surprises), _alike(tokens, before, surprises))))
        else:
            repeats.append(Repeat(sample, known=False))
        insort(own, tokens)
    return repeats


def _alike(tokens: tuple[int, ...], others: Sequence[tuple[int, ...]], surprises: Sequence[float]) -> float:
    """Return the log-likelihood ratio of a copy of the most similar of some sorted responses."""
    place, ratio = bisect(others, tokens), -math.inf
    for other in others[max(place - 1, 0) : place + 1]:
        shared = next((at for at, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(tokens), len(other)) if shared is None else shared
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
        [response_of(turns) for turns in samples.values()],
        torch.zeros(len(WAGERS), dtype=torch.float64) if odds is None else odds,
        likelihood_ratios(draws),
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


def likelihood_ratios(draws: Sequence[Draw]) -> tuple[float, ...]:
    """Return the log-likelihood ratios of partly greedy engines and of each minimum length, over all draws."""
    return tuple(sum(parts) for parts in zip(*((draw.greedy, *draw.unended) for draw in draws), strict=True)) or (
        0.0,
    ) * (1 + len(LEAST_TOKENS))


@torch.no_grad()
def score_draws(
    module: RLLightningModule,
    batches: Sequence[Sequence[Pair]],
    number: int,
    tolerance: float,
    *,
    earlier: Sequence[Earlier] = (),
) -> list[Draw]:
    """Return a few fresh samples scored by the policy's own forward; empty if weights are sharded."""
    placed = [one for one in _places_of(batches) if _is_fresh(one[2], number, module.run.sampling.filters)]
    placed.sort(key=lambda one: one[2][0].seed)  # random, independent of the completions
    again = sorted(range(len(placed)), key=lambda row: order_of(placed[row][1], placed[row][0]))  # as in other rollouts
    mixed = dict.fromkeys(row for pair in enumerate(again) for row in pair)
    placed = [placed[row] for row in mixed]
    placed = placed[: affordable_draws([pair for _, _, pair in placed])]
    few = [pair for _, _, pair in placed]
    before = {draw.place: draw for one in earlier[-1:] for draw in one.draws}
    if not few or not forwards_plainly(module):
        return []
    model, ends = module.required_policy.model, sorted(module.run.sampling.eos_token_ids or ())
    with module.trainer.precision_plugin.forward_context():
        rows = zip(placed, _scores(model, few), strict=True)
        return [
            _draw(*pair, scores, ends, tolerance, (batch, place), before.get((batch, place)))
            for (batch, place, pair), scores in rows
        ]


def affordable_draws(pairs: Sequence[Pair]) -> int:
    """Return the number of leading samples within the budget."""
    sampled = all_tokens = 0
    for number, (request, completion) in enumerate(pairs[:MAX_DRAWS]):
        if number >= MIN_DRAWS and (sampled >= BUDGET or all_tokens >= ALL_BUDGET):
            return number
        sampled += min(len(completion.token_ids), MAX_TOKENS)
        all_tokens += len(request.prefix_ids) + min(len(completion.token_ids), MAX_TOKENS)
    return min(len(pairs), MAX_DRAWS)


def _is_fresh(pair: Pair, number: int, filters: bool) -> bool:  # noqa: FBT001
    completion = pair[1]
    known = not filters or SAMPLING_MASK in completion.token_extras
    return known and set(completion.versions or (completion.version,)) == {number}


def _scores(model: nn.Module, pairs: Sequence[Pair]) -> list[Tensor]:
    """Return the log-probabilities over the vocabulary at the first tokens of each sample, at its temperature."""
    device = next(model.parameters()).device
    ids = [
        torch.tensor([*request.prefix_ids, *completion.token_ids[:MAX_TOKENS]], device=device)
        for request, completion in pairs
    ]
    logits = model(input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False).logits
    scores = []
    for row, (request, completion) in enumerate(pairs):
        begin, length = len(request.prefix_ids), min(len(completion.token_ids), MAX_TOKENS)
        normal = logits[row, begin - 1 : begin - 1 + length].double() / request.sampling.temperature
        if SAMPLING_MASK in completion.token_extras:
            bits = completion.token_extras[SAMPLING_MASK][:length].to(device)
            normal = normal.masked_fill(~from_bits(bits, normal.shape[-1]), -torch.inf)
        scores.append(normal.log_softmax(-1).cpu())
    return scores


def _draw(
    request: Request,
    completion: Completion,
    scores: Tensor,
    ends: Sequence[int],
    tolerance: float,
    place: tuple[int, int],
    before: Draw | None,
) -> Draw:
    own, tokens = _own(completion, scores), tuple(completion.token_ids[: len(scores)])
    probabilities = scores.exp()
    quantiles = quantiles_of(tokens, probabilities)
    return Draw(
        request.sample_id,
        _greedy_ratio(own, scores, tolerance),
        _unended_ratios(completion, scores, ends, tolerance),
        place,
        tokens,
        quantiles,
        (0.0,) * NOISE_RATIOS if before is None else _noise_ratios(tokens, scores, quantiles, before, tolerance),
        kinds_of(request.prefix_ids, tokens, probabilities, ends),
    )


def _greedy_ratio(own: Tensor, scores: Tensor, tolerance: float) -> float:
    """Return the log-likelihood ratio of an engine that draws :data:`GREEDY_SHARE` of the samples greedily.

    Tokens within rounding of the largest logit count as equally likely choices of such an engine.
    """
    least = scores.amax(-1) - tolerance
    if (own < least).any():
        return math.log1p(-GREEDY_SHARE)
    likeliest = (scores >= least[:, None]).sum(-1).log().sum()
    surest = -float(own.sum() + likeliest) - tolerance * len(own)
    return float(torch.logaddexp(*torch.tensor([math.log1p(-GREEDY_SHARE), math.log(GREEDY_SHARE) + surest])))


def _unended_ratios(completion: Completion, scores: Tensor, ends: Sequence[int], tolerance: float) -> tuple[float, ...]:
    """Return the log-likelihood ratios of engines that end no sample before each minimum length."""
    going_on = -torch.log1p(-scores[:, list(ends)].exp().sum(-1) * math.exp(-tolerance))
    ended = [place for place, token in enumerate(completion.token_ids[: len(scores)]) if token in ends]
    first = ended[0] if ended else len(scores)
    return tuple(-math.inf if first < least - 1 else float(going_on[: least - 1].sum()) for least in LEAST_TOKENS)


def quantiles_of(tokens: Sequence[int], probabilities: Tensor) -> Tensor:
    """Return the intervals of tokens in the cumulative distributions [N, V] before them, see :class:`Draw`."""
    places = torch.tensor(tokens, dtype=torch.int64)[:, None]
    own = probabilities.gather(1, places)
    earlier = torch.arange(probabilities.shape[1]) < places
    first = torch.stack([earlier, (probabilities > own) | (earlier & (probabilities == own))])
    begin = torch.where(first, probabilities, 0.0).sum(-1)
    return torch.stack([begin, begin + own[:, 0]], 1)


def _noise_ratios(
    tokens: Sequence[int], scores: Tensor, quantiles: Tensor, before: Draw, tolerance: float
) -> tuple[float, ...]:
    r"""Return the log-likelihood ratios of engines that draw some tokens with the noise of an earlier draw.

    Equal noise makes tokens equal, or intervals of the cumulative distribution overlap. A token equals a given one with
    its probability p, so :math:`[\text{equal}] / p` has mean 1 after any other tokens. So has the overlap of two
    intervals over the product of their lengths.
    """
    number = min(len(tokens), len(before.tokens))
    ours, theirs = (torch.tensor(part[:number], dtype=torch.int64) for part in (tokens, before.tokens))
    least = scores[:number].gather(1, theirs[:, None])[:, 0]
    one, other = quantiles[..., :number], before.quantiles[..., :number]
    overlap = (torch.minimum(one[:, 1], other[:, 1]) - torch.maximum(one[:, 0], other[:, 0])).clamp(min=0.0)
    lengths = (one[:, 1] - one[:, 0]) * (other[:, 1] - other[:, 0])
    gains = torch.cat([torch.where(ours == theirs, (-least).exp(), 0.0)[None], overlap / lengths.clamp(min=1e-300)])
    gains = gains * math.exp(-tolerance)
    return tuple(float((1 - share + share * kind).log().sum()) for kind in gains for share in NOISE_SHARES)


def _own(completion: Completion, scores: Tensor) -> Tensor:
    return scores.gather(1, torch.tensor(completion.token_ids[: len(scores)])[:, None])[:, 0]
