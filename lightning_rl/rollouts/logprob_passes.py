"""Forward passes over a rollout before its update: old and reference log-probabilities, and values of the critic."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.policy import FrozenModel, Plan, PolicyModel
from lightning_rl.policy.load_balancing import load_of_steps, record_routers
from lightning_rl.policy.model import FiniteOutputs
from lightning_rl.rollout import EXPERT_LOAD, SUM_PI_SQUARED, Rollout, turn_numbers
from lightning_rl.signal.masked import GlobalSum, local_sum


@torch.no_grad()
def add_logprobs(
    rollout: Rollout,
    plan: Plan,
    policy: PolicyModel,
    reference: FrozenModel | None,
    corrections: Corrections,
    *,
    old: bool,
    rollout_as_old: bool = False,
    squares: bool = False,
    loads: bool = False,
    global_sum: GlobalSum = local_sum,
) -> Rollout:
    """Add ``old_logprobs`` if ``old``, ``ref_logprobs`` given a reference, and ``values`` given a critic to a rollout.

    With ``squares``, ``token_extras`` holds the sum of squared probabilities over the vocabulary at each token. With
    ``loads``, ``extras`` holds the load of the experts in the optimizer step of each row, over all ranks. The
    microbatches are those of the update, so the importance ratio of an unchanged policy is exactly 1. With
    ``rollout_as_old``, ``old_logprobs`` are the engine's.
    """
    critic = policy.value_head is not None
    exact = torch.promote_types(policy.model.dtype, torch.float32)
    empty = torch.zeros(rollout.response_ids.shape, dtype=exact, device=rollout.response_ids.device)
    old_logprobs, values, ref_logprobs, sums = (empty.clone() for _ in range(4))
    finite, load = FiniteOutputs(rollout.groups.device), None
    for microbatch in plan.microbatches():
        if old or critic or squares or loads:
            rows = microbatch.rows_of(rollout)
            recorder = record_routers(policy.model) if loads else nullcontext()
            with corrections.forward_context(rows), recorder as routers:
                outputs = policy(microbatch.layout, squares=True) if squares else policy(microbatch.layout)
            finite.note(outputs, rows)
            microbatch.write(old_logprobs, outputs.logprobs)
            if outputs.values is not None:
                microbatch.write(values, outputs.values)
            if outputs.sum_pi_squared is not None:
                microbatch.write(sums, outputs.sum_pi_squared)
            if routers is not None:
                of_rows = routers.loads(microbatch.layout)
                load = of_rows.new_zeros(len(rollout), of_rows.shape[1]) if load is None else load
                load.index_add_(0, microbatch.index, of_rows[: len(microbatch.index)])
        if reference is not None:
            microbatch.write(ref_logprobs, reference.logprobs(microbatch.layout))
    finite.check()
    return rollout.replace(
        old_logprobs=rollout.rollout_logprobs if rollout_as_old else old_logprobs if old else None,
        values=values if critic else None,
        extras=rollout.extras
        if load is None
        else {**rollout.extras, EXPERT_LOAD: load_of_steps(load, plan, global_sum)},
        ref_logprobs=ref_logprobs if reference is not None else None,
        token_extras={**rollout.token_extras, **({SUM_PI_SQUARED: sums} if squares else {})},
    )


@torch.no_grad()
def environment_logprob(rollout: Rollout, policy: PolicyModel, plan_of: Callable[..., Plan]) -> Stat:
    """Return the policy's mean log-probability, in nats, of the environment's tokens in one row of each group.

    It drifts slowly while those tokens are inputs only, and rises by nats within a few rollouts if they leak into the
    loss. They are found by their turn numbers, because a leak would be in ``action_mask`` itself.

    Args:
        rollout: Rollout on the CPU.
        policy: Policy at the sampling temperature.
        plan_of: Builds a plan from rows and a number of minibatches, with equally many microbatches on every rank.
    """
    chosen = [rollout.groups.tolist().index(group) for group in dict.fromkeys(rollout.groups.tolist())]
    rows = rollout.select(torch.tensor(chosen, dtype=torch.int64))
    in_response = torch.arange(rows.width) < rows.response_lengths[:, None]
    mask = in_response & (turn_numbers(rows) == 0)  # neither sampled nor rewritten
    rows, logprobs = rows.replace(valid_tokens=mask, trained=rows.real), torch.zeros(mask.shape)
    device = next(policy.parameters()).device
    for microbatch in plan_of(rows, minibatches=1).to(device).microbatches():
        microbatch.write(logprobs, policy(microbatch.layout).logprobs)
    return Stat.of(logprobs, mask)
