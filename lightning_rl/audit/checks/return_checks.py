"""Check of returns: nothing is bootstrapped past the end of a response."""

from collections.abc import Iterator

import torch

from lightning_rl.advantages import GAEOverTurns
from lightning_rl.audit.audit_error import Skip, differences, rounding
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollout import TURNS
from lightning_rl.utils.finding import Finding


@check(
    culprit="estimator {estimator}",
    expected="returns that end with the reward of the last token, without a value after it",
    cure="do not bootstrap past the end: a finished response has no next value",
)
def returns_end_with_the_reward(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Nothing is bootstrapped past the end: the last return is the shaped reward of its token, or of its turn."""
    rollout, returns = evidence.groups, evidence.groups.returns
    if returns is None:
        yield Skip("there are no returns, since there is no critic")
        return
    if (shaped := evidence.rewards_of_run) is None:
        yield Skip("a reward depends on the rows of other ranks")
        return
    valid = rollout.valid_tokens
    ends = last = valid & (valid.flip(-1).cumsum(-1).flip(-1) == 1)
    if isinstance(evidence.algorithm.advantages, GAEOverTurns):
        turns = rollout.token_extras.get(TURNS, valid.long())
        ends = valid & (turns == torch.where(last, turns, 0).sum(-1, keepdim=True))
    values = torch.zeros_like(returns) if rollout.values is None else rollout.values
    size = torch.where(valid, returns.abs() + values.abs(), 0.0)
    atol = rounding(rollout.rewards.dtype, float(size.max()) if size.numel() else 0.0)
    end, reward = torch.where(last, returns, 0.0).sum(-1), torch.where(ends, shaped, 0.0).sum(-1)
    yield from differences(end, reward, rollout.sample_ids, observed="something else", atol=atol)
