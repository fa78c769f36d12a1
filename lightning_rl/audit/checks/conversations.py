"""Checks of conversations: turns have seeds of their own, and their rewards lie where they were earned."""

from collections import defaultdict
from collections.abc import Iterator
from math import isclose

from lightning_rl.audit.checks.check import check
from lightning_rl.audit.checks.rewards import samples_of_calls
from lightning_rl.audit.draws import turns_of
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Skip
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.finding import Finding
from lightning_rl.generation import turn_seed
from lightning_rl.rollout import TURN_REWARDS, TURNS

ENVIRONMENT_REWARD = REWARD_COLUMNS[1]


@check(
    culprit="stage draw, the turns of its conversations",
    cure="make the seed of a turn with turn_seed from that of the first one, and count turns from 0",
)
def turn_order(evidence: Evidence) -> Iterator[Finding]:
    """The turns of a conversation are numbered from 0 on, and each is drawn with the seed of its (sample, turn), so
    that no driver and no order of environments changes a token.
    """
    wrong = defaultdict[str, list[int]](list)
    for sample, turns in turns_of(evidence.batches).items():
        first = turns[0][0].seed
        if [request.turn for request, _ in turns] != list(range(len(turns))):
            wrong["turns 0, 1, 2, ... of each sample"].append(sample)
        elif any(request.seed != turn_seed(first, request.turn) for request, _ in turns):
            wrong["the seed of its sample and turn at every request"].append(sample)
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
