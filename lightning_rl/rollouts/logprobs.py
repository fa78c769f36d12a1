"""What the models say of a rollout before its update: old and reference log-probabilities, values of the critic."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.policy import Plan, PolicyModel, Scorer
from lightning_rl.policy.model import FiniteOutputs
from lightning_rl.rollout import SUM_PI_SQUARED, TURNS, Rollout


@torch.no_grad()
def add_logprobs(
    rollout: Rollout,
    plan: Plan,
    policy: PolicyModel,
    reference: Scorer | None,
    corrections: Corrections,
    *,
    old: bool,
    squares: bool = False,
) -> Rollout:
    """The rollout with ``old_logprobs`` if ``old``, ``ref_logprobs`` given a reference, ``values`` given a critic.

    With ``squares``, ``token_extras`` have the sum of the squared probabilities of the vocabulary before each token.

    Uses the microbatches of the update, so that the importance ratio of an unchanged policy is exactly 1.
    """
    critic = policy.value_head is not None
    exact = torch.promote_types(policy.model.dtype, torch.float32)
    empty = torch.zeros(rollout.response_ids.shape, dtype=exact, device=rollout.response_ids.device)
    old_logprobs, values, ref_logprobs, sums = (empty.clone() for _ in range(4))
    finite = FiniteOutputs(rollout.groups.device)
    for microbatch in plan.microbatches():
        if old or critic or squares:
            rows = microbatch.rows_of(rollout)
            with corrections.forward_context(rows):
                outputs = policy(microbatch.layout, squares=True) if squares else policy(microbatch.layout)
            finite.note(outputs, rows)
            _write(old_logprobs, microbatch.index, outputs.logprobs)
            if outputs.values is not None:
                _write(values, microbatch.index, outputs.values)
            if outputs.sum_pi_squared is not None:
                _write(sums, microbatch.index, outputs.sum_pi_squared)
        if reference is not None:
            _write(ref_logprobs, microbatch.index, reference.logprobs(microbatch.layout))
    finite.check()
    return rollout.replace(
        old_logprobs=old_logprobs if old else None,
        values=values if critic else None,
        ref_logprobs=ref_logprobs if reference is not None else None,
        token_extras={**rollout.token_extras, **({SUM_PI_SQUARED: sums} if squares else {})},
    )


@torch.no_grad()
def environment_logprob(rollout: Rollout, policy: PolicyModel, plan_of: Callable[..., Plan]) -> Stat:
    """How likely the policy finds what environments say, in nats, over their tokens in one row of each group.

    It drifts slowly while those tokens are only read, and rises by nats within some rollouts once they train. The turns
    say which they are, not ``action_mask``: its leak is what this is to show.

    Args:
        rollout: on the CPU.
        policy: at the temperature of sampling.
        plan_of: from rows and a number of minibatches to their plan, with as many microbatches on every rank.
    """
    chosen = [rollout.groups.tolist().index(group) for group in dict.fromkeys(rollout.groups.tolist())]
    rows = rollout.select(torch.tensor(chosen, dtype=torch.int64))
    said = (torch.arange(rows.width) < rows.response_lengths[:, None]) & (
        rows.token_extras[TURNS] == 0
    )  # neither drawn nor rewritten
    rows, logprobs = rows.replace(valid_tokens=said, trained=rows.real), torch.zeros(said.shape)
    device = next(policy.parameters()).device
    for microbatch in plan_of(rows, minibatches=1).to(device).microbatches():
        _write(logprobs, microbatch.index.cpu(), policy(microbatch.layout).logprobs.cpu())
    return Stat.of(logprobs, said)


def _write(target: Tensor, index: Tensor, source: Tensor) -> None:
    if len(index):
        target[index, : source.shape[1]] = source.to(target.dtype)
