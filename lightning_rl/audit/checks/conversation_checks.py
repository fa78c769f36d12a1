"""Checks of conversations: turns and their seeds, tool calls, rewards, and tokens that must not train."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isclose

import torch
from torch import Tensor

from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.sampling_statistics import Pair
from lightning_rl.corrections import REWARDS
from lightning_rl.environments import ConversationLimits
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.fields import Ragged
from lightning_rl.generation import request_seed, turn_seed
from lightning_rl.rollout import TOKEN, TURN_REWARDS, segments_of, turn_numbers
from lightning_rl.samples.seeds import call_seed
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip, differences
from lightning_rl.testing.properties.definitions import figure_of
from lightning_rl.testing.properties.signal_checks import signal_rounding
from lightning_rl.utils.finding import Finding

ENVIRONMENT_REWARD = REWARD_COLUMNS[1]


@check(
    culprit="stage generate, the seeds and turns of its requests",
    cure="derive seeds with request_seed, and with turn_seed for further turns, and count turns from 0",
)
def turn_order(evidence: Evidence) -> Iterator[Finding]:
    """Turns of a conversation are numbered from 0, each drawn with the seed of its rollout, sample and turn.

    A call of a program has the seed of its rollout, sample and prefix.

    So tokens do not depend on the driver or on the order of environments. The first turn has the seed of a single-turn
    sample.
    """
    wrong, seed = defaultdict[str, list[int]](list), evidence.facts.seed
    for sample, turns in evidence.turns.items():
        first = turns[0][0].seed
        if [request.turn for request, _ in turns] != list(range(len(turns))):
            wrong["turns 0, 1, 2, ... of each sample"].append(sample)
        elif _are_calls(evidence, sample):
            continue
        elif any(request.seed != turn_seed(first, request.turn) for request, _ in turns):
            wrong["the seed of its sample and turn at every request"].append(sample)
        elif seed is not None and first != request_seed(seed, evidence.number, sample):
            wrong["the seed of its run, rollout and sample at every first request"].append(sample)
    for expected, samples in wrong.items():
        yield Finding(expected=expected, observed=f"{len(samples)} others", samples=samples[:4])


def _are_calls(evidence: Evidence, sample: int) -> bool:
    """Return True if the turns of a sample have the seeds of calls of a program."""
    requests, repeats = [request for request, _ in evidence.turns[sample]], Counter[tuple[str, tuple[int, ...]]]()
    first, right = request_seed(evidence.facts.seed or 0, evidence.number, sample), list[int]()
    for request in requests:
        repeat = repeats[request.role, request.prefix_ids]
        right.append(call_seed(first, request.prefix_ids, repeat, request.role))
        repeats[request.role, request.prefix_ids] += 1
    return sorted(request.seed for request in requests) == sorted(right)


@check(
    culprit="stage generate, the rewards of turns",
    cure="put the reward of a turn at its last sampled token, and add up the environment's rewards",
)
def turn_rewards(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The reward of each turn is at its last sampled token, and they add up to the environment's reward."""
    rollout = evidence.rollout
    if TURN_REWARDS not in rollout.token_extras:
        return
    values, numbers = rollout.token_extras[TURN_REWARDS], turn_numbers(rollout)
    last = (numbers > 0) & (numbers != numbers.roll(-1, -1))
    last[:, -1] |= numbers[:, -1] > 0
    astray = ((values != 0) & ~(last & rollout.action_mask)).any(-1)
    if astray.any():
        yield Finding(
            expected="rewards at the last sampled token of a turn",
            observed=f"others in {int(astray.sum())} rows",
            samples=rollout.sample_ids[astray][:4].tolist(),
        )
    given = _environment_rewards(evidence)
    whole = (rollout.valid_tokens == rollout.action_mask).all(-1)  # the rewards of other turns are 0 by now
    sums = zip(rollout.sample_ids[whole].tolist(), values[whole].double().sum(-1).tolist(), strict=True)
    wrong = [
        sample
        for sample, total in sums
        if sample in given and not isclose(given[sample], total, abs_tol=1e-5, rel_tol=1e-5)
    ]
    if wrong:
        yield Finding(
            expected="rewards of turns that add up to the environment's",
            observed=f"another sum in {len(wrong)} rows",
            samples=wrong[:4],
        )
    if not given:
        yield Skip("no reward function gets the environment's reward")


def _environment_rewards(evidence: Evidence) -> dict[int, float]:
    """Return the environment's rewards in the columns of reward calls, by sample."""
    given: dict[int, float] = {}
    for call, samples in zip(evidence.calls, samples_of_calls(evidence.batches, evidence.calls), strict=True):
        values = call.columns.get(ENVIRONMENT_REWARD, ())
        given |= {sample: 0.0 if value is None else value for sample, value in zip(samples, values, strict=False)}
    return given


@check(
    culprit="estimator {estimator}",
    expected="statistics over samples, each counted once",
    cure="compare samples by their total reward, not turns or rows of a sample",
)
def sample_weights(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Statistics of a group count a sample once, regardless of its turns and rows.

    The advantage of a row is the same with all tokens in one turn and without further rows of its sample, unless the
    steps of the estimator are turns or tokens.
    """
    groups, estimator = evidence.groups, evidence.algorithm.advantages
    if groups.segments is None:
        return
    if estimator.per_token or estimator.turn_rewards:
        yield Skip("the steps of the estimator are turns or tokens")
        return
    joined = (turn_numbers(groups) > 0).long()
    one = groups.replace(segments=segments_of(joined, groups.response_lengths))
    changed = differences(evidence.advantages_of(one), evidence.advantages, groups.sample_ids)
    yield from (replace(finding, observed="others with joined turns") for finding in changed)
    ids = groups.sample_ids.tolist()
    first = torch.tensor([place for place, sample in enumerate(ids) if sample not in ids[:place]], dtype=torch.int64)
    if len(first) < len(ids):
        alone, kept = evidence.advantages_of(groups.select(first)), evidence.advantages[first]
        changed = differences(alone, kept, groups.sample_ids[first])
        yield from (replace(finding, observed="others with one row per sample") for finding in changed)


@check(
    culprit="stage generate, the tokens of a conversation that the chat template writes",
    cure="render all messages and tool schemas with the template, without control tokens from their texts, and close "
    "each answer once",
)
def written_turns(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Contexts and tokens between two answers are those of the chat template for their messages and tools.

    Each answer is closed once, and no message, schema, header or space is lost, added or changed.
    """
    known = [one for one in evidence.written if one.template]
    if len(known) < len(evidence.written):
        yield Skip("the tokens of the chat template are unknown for some turns")
    wrong = [one for one in known if one.tokens not in one.forms]
    if wrong:
        ours, right = wrong[0].tokens, wrong[0].forms[0]
        pairs = enumerate(zip(ours, right, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(right)))
        yield Finding(
            expected=f"{list(right[place : place + 16])} at token {place} of {len(right)} of turn {wrong[0].turn}",
            observed=f"{list(ours[place : place + 16])} of {len(ours)}; {len(wrong)} of {len(known)} turns differ",
            samples=[one.sample for one in wrong][:4],
        )


@check(
    culprit="stage generate, the request of a conversation's turn",
    cure="request the rest of max_new_tokens, max_turn_tokens and the context, and at most max_turns",
)
def turn_limits(evidence: Evidence) -> Iterator[Finding]:
    """A turn may draw the remaining tokens of its conversation, up to the limits of a turn and of the context.

    Environment tokens count for the context only. No conversation exceeds its number of turns. Calls of a program may
    draw less, and the maximum is that of each context.
    """
    limits, wrong = evidence.facts.limits, defaultdict[str, list[int]](list)
    if limits is None:
        return
    for sample, turns in evidence.turns.items():
        calls = _are_calls(evidence, sample)
        rooms = _rooms(turns, evidence.facts.max_new_tokens, limits, calls=calls)
        if len(turns) > limits.turns:
            wrong[f"at most {limits.turns} turns of a conversation"].append(sample)
        elif any(
            request.sampling.max_new_tokens > room or (request.sampling.max_new_tokens < room and not calls)
            for (request, _), room in rooms
        ):
            wrong["requests for what is left of the tokens of each conversation, turn and context"].append(sample)
    for expected, samples in wrong.items():
        yield Finding(expected=expected, observed=f"others in {len(samples)} conversations", samples=samples[:4])


def _rooms(
    turns: Sequence[Pair], whole: int, limits: ConversationLimits, *, calls: bool
) -> Iterator[tuple[Pair, float]]:
    """Yield each turn with the number of tokens that it may draw, of those of all turns, or of its context's calls."""
    for number, (request, completion) in enumerate(turns):
        before = [(*one.prefix_ids, *answer.token_ids) if calls else () for one, answer in turns[:number]]
        drawn = sum(
            len(answer.token_ids)
            for ids, (_, answer) in zip(before, turns, strict=False)
            if request.prefix_ids[: len(ids)] == ids
        )
        length = (limits.length or inf) - len(request.prefix_ids)
        yield (request, completion), min(whole - drawn, limits.turn_tokens or inf, length)


@check(
    culprit="stage generate, the conversation that rewards get",
    expected="the token ids of the last answer as a completion",
    cure="pass the tokens of the last answer to rewards",
)
def told_rewards(evidence: Evidence) -> Iterator[Finding]:
    """Rewards score the tokens of the last answer, without environment tokens."""
    if samples := evidence.judged_otherwise:
        yield Finding(observed=f"others in {len(samples)} conversations", samples=samples[:4])


@check(
    cure="create one environment per conversation without shared state, with random numbers from the seed of reset; "
    "if intended: replayable = False",
)
def environment_replays(evidence: Evidence) -> Sequence[Finding | Skip]:
    """Messages of an environment depend only on row, seed and answers.

    Repeated conversations equal the recorded ones, alone and interleaved with others.
    """
    return evidence.replays


@check(
    culprit="metric env/logprob",
    cure="score the tokens that the policy did not sample, with the policy of this rollout",
    of_step=True,
)
def environment_logprob(evidence: Evidence) -> Iterator[Finding | Skip]:
    """``env/logprob`` is the mean log-probability of environment tokens and of no sampled token."""
    step, truth = evidence.step, evidence.words_logprob
    if step is None or "env/logprob" not in step.logged:
        return
    if truth is None:
        yield Skip("the scored rows have no environment tokens, or too many")
        return
    count, logged = figure_of(step.logged["env/logprob"], "mean")
    if count and abs(logged - truth) > evidence.facts.tolerance:
        yield Finding(expected=f"{truth:.6g} nats", observed=f"{logged:.6g}")


@check(
    culprit="estimator {estimator}",
    expected="the same advantages at sampled tokens, however many tokens the environment adds",
    observed="others without the environment tokens",
    cure="use only valid tokens as time steps and for rewards",
)
def silent_environments(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Environment tokens are no time steps: advantages of sampled tokens are the same without them."""
    groups = evidence.groups
    if groups.segments is None or not bool((groups.segments.values[:, 2] > 0).any()):
        return
    if evidence.contributions(*REWARDS):
        yield Skip("corrections that give rewards may read environment tokens")
        return
    order = (~groups.action_mask).to(torch.int8).argsort(dim=-1, stable=True)
    alone = groups.map(lambda tensor, axis, _: _along(tensor, order) if axis == TOKEN else tensor)
    lengths = groups.action_mask.sum(-1).to(groups.response_lengths.dtype)
    values, counts = groups.segments.values, groups.segments.counts
    rows = torch.arange(len(counts)).repeat_interleave(counts).to(values.device)
    starts = torch.nn.functional.pad(groups.action_mask.cumsum(-1), (1, 0))[rows, values[:, 0]]  # sampled tokens before
    segments = Ragged(torch.cat([starts[:, None], values[:, 1:]], 1), counts)
    alone = alone.replace(response_lengths=lengths, segments=segments)
    theirs = torch.zeros_like(evidence.advantages).scatter(1, order, evidence.advantages_of(alone))
    valid, atol = groups.valid_tokens, signal_rounding(groups, groups, evidence.advantages)
    ours, theirs = (torch.where(valid, one, 0.0) for one in (evidence.advantages, theirs))
    yield from differences(ours, theirs, groups.sample_ids, atol=atol)


def _along(tensor: Tensor, order: Tensor) -> Tensor:
    """Return a tensor [B, T, ...] with the tokens of each row in another order."""
    return tensor[torch.arange(len(order), device=order.device)[:, None], order]
