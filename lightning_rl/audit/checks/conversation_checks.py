"""Checks of conversations: turns and their seeds, calls and rewards, and what must not train."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import isclose

import torch

from lightning_rl.audit.audit_error import Skip, differences
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.sampling_statistics import turns_of
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.generation import request_seed, turn_seed
from lightning_rl.rollout import TURN_REWARDS, TURNS
from lightning_rl.utils.finding import Finding

ENVIRONMENT_REWARD = REWARD_COLUMNS[1]
LEAST_MOVES = 6  # rollouts
LEAST_NATS, SHARE = 1.0, 1 / 4  # for each word of an environment; of how far the policy's tokens moved


@check(
    culprit="stage draw, the turns of its conversations",
    cure="make the seed of a turn with turn_seed from that of the first one, and count turns from 0",
)
def turn_order(evidence: Evidence) -> Iterator[Finding]:
    """The turns of a conversation are numbered from 0 on, and each is drawn with the seed of its (rollout, sample,
    turn), so that no driver and no order of environments changes a token; that of the first turn is the one of an
    answer that nobody answers.
    """
    wrong, seed = defaultdict[str, list[int]](list), evidence.facts.seed
    for sample, turns in turns_of(evidence.batches).items():
        first = turns[0][0].seed
        if [request.turn for request, _ in turns] != list(range(len(turns))):
            wrong["turns 0, 1, 2, ... of each sample"].append(sample)
        elif any(request.seed != turn_seed(first, request.turn) for request, _ in turns):
            wrong["the seed of its sample and turn at every request"].append(sample)
        elif seed is not None and first != request_seed(seed, evidence.number, sample):
            wrong["the seed of its run, rollout and sample at every first request"].append(sample)
    for expected, samples in wrong.items():
        yield Finding(expected=expected, observed=f"{len(samples)} others", samples=samples[:4])


@check(
    culprit="stage draw, the rewards of turns",
    cure="put the reward of a turn at its last drawn token, and add up what the environment gave",
)
def turn_rewards(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Each turn's reward lies at the last token that was drawn in it, and the rewards of a row's turns add up to what
    the rewards are told that its environment gave.
    """
    rollout = evidence.rollout
    if TURN_REWARDS not in rollout.token_extras:
        return
    values, numbers = rollout.token_extras[TURN_REWARDS], rollout.token_extras[TURNS]
    last = (numbers > 0) & (numbers != numbers.roll(-1, -1))
    last[:, -1] |= numbers[:, -1] > 0
    astray = ((values != 0) & ~(last & rollout.action_mask)).any(-1)
    if astray.any():
        yield Finding(
            expected="rewards at the last drawn token of a turn",
            observed=f"others in {int(astray.sum())} rows",
            samples=rollout.sample_ids[astray][:4].tolist(),
        )
    given = _environment_rewards(evidence)
    sums = zip(rollout.sample_ids.tolist(), values.double().sum(-1).tolist(), strict=True)
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
        yield Skip("no reward function was told what the environment gave")


def _environment_rewards(evidence: Evidence) -> dict[int, float]:
    """What rewards are told that the environment gave, by sample."""
    given: dict[int, float] = {}
    for call, samples in zip(evidence.calls, samples_of_calls(evidence.batches, evidence.calls), strict=True):
        values = call.columns.get(ENVIRONMENT_REWARD, ())
        given |= {sample: 0.0 if value is None else value for sample, value in zip(samples, values, strict=False)}
    return given


@check(
    culprit="stage draw, the tool calls of answers",
    expected="no tool call of an answer that was cut off",
    cure="parse nothing in an answer that ended for its length: half a call is no call",
)
def cut_calls(evidence: Evidence) -> Iterator[Finding]:
    """No tool call is read in an answer that a limit of tokens cut off, so none is made."""
    cut = [one.sample for one in evidence.told if one.calls_when_cut]
    if cut:
        yield Finding(observed=f"some in {len(cut)} conversations", samples=cut[:4])


@check(
    culprit="estimator {estimator}",
    expected="statistics over samples, each counted once",
    cure="compare samples by their whole reward: neither turns nor further rows of a sample are samples",
)
def sample_weights(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Statistics of a group count a sample once, whatever its turns or rows: with all of its tokens in one turn, and
    without its further rows, a row has the same advantage, unless turns or tokens are the steps of the estimator.
    """
    groups, estimator = evidence.groups, evidence.algorithm.advantages
    if TURNS not in groups.token_extras:
        return
    if estimator.per_token:
        yield Skip("the estimator's steps are turns or tokens")
        return
    turns = groups.token_extras[TURNS]
    one = groups.replace(token_extras={**groups.token_extras, TURNS: (turns > 0).to(turns.dtype)})
    changed = differences(evidence.advantages_of(one), evidence.advantages, groups.sample_ids)
    yield from (replace(finding, observed="others where turns are joined") for finding in changed)
    ids = groups.sample_ids.tolist()
    first = torch.tensor([place for place, sample in enumerate(ids) if sample not in ids[:place]], dtype=torch.int64)
    if len(first) < len(ids):
        alone, kept = evidence.advantages_of(groups.select(first)), evidence.advantages[first]
        changed = differences(alone, kept, groups.sample_ids[first])
        yield from (replace(finding, observed="others where a sample has one row") for finding in changed)


@check(
    culprit="stage update, or whoever else trains what environments say",
    expected="words of environments that get no likelier by themselves",
    cure="train the tokens of action_mask alone, in every loss and every forward",
    of_step=True,
)
def environment_moves(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What environments say is read and not trained: over the last audited rollouts the updates do not make it
    likelier, beyond what the policy draws, by a nat and by a quarter of how far the log-odds of that move.
    """
    if TURNS not in evidence.rollout.token_extras:
        return
    moves = evidence.moves
    if len(moves) < LEAST_MOVES:
        yield Skip(f"{len(moves)} rollouts of {LEAST_MOVES} with words of environments were looked at")
        return
    risen, size = sum(move.said - max(move.drawn, 0.0) for move in moves), sum(move.size for move in moves)
    if risen > max(LEAST_NATS, SHARE * size):
        yield Finding(
            observed=f"{risen:.3g} nats more for each of their tokens in {len(moves)} rollouts, in which tokens of the "
            f"policy moved by {size:.3g} in log-odds"
        )
