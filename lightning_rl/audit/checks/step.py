"""Checks of one optimizer step as it was made: denominators over all ranks, gradients, parameters, what was logged."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rl.audit.checks.check import check
from lightning_rl.audit.checks.metrics import kl_values
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Skip, differences
from lightning_rl.audit.step import StepEvidence
from lightning_rl.corrections import ParameterTrace
from lightning_rl.finding import Finding

MAXIMA = ("length/max", "advantage/max", "policy/ratio_max")
UNSEEN = "no optimizer step was seen: it had no valid token, its gradient was not finite, or a scaler hides it"
REPRESENTABLE = 100.0  # a step has to be so many units in the last place for a parameter to have to move


@check(cure="", of_step=True)
def raw_fields(evidence: Evidence) -> Sequence[Finding]:
    """No field of the finished rollout changes until its last optimizer step, by whatever way it is written."""
    return evidence.edits


@check(
    culprit="reduction {reduction}, or the sums over ranks",
    expected="denominators over the rows of all ranks",
    cure="take every sum of a reduction through global_sum, and every row once",
    of_step=True,
)
def rank_denominators(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The weight of a token in a step is that of a reduction over the rows of all ranks at once, however they are split
    over ranks and microbatches.
    """
    step = evidence.step
    if step is None or step.weights is None or not len(step.rows):
        yield Skip(UNSEEN if step is None else "this rank had no rows in the step")
        return
    weights = step.weights_over_ranks(evidence.algorithm.reduction)
    yield from differences(step.weights.cpu(), weights, step.rows.sample_ids)


@check(
    culprit="stage update, the accumulation of microbatches",
    expected="the gradient of the whole step in one piece",
    cure="add up the microbatches' shares as they are, from the old log-probabilities of the rollout",
    of_step=True,
)
def step_gradient(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The gradient that each log-probability of a step got is that of the whole step in one piece, computed from the
    finished rollout: nothing is scaled, left out, or recomputed between optimizer steps.
    """
    step = evidence.step
    if step is None or step.expected is None:
        yield Skip(UNSEEN if step is None else "this rank had no rows, or the loss needs those of other ranks")
        return
    valid, scale = step.rows.valid_tokens, float(step.expected.abs().max()) if step.expected.numel() else 0.0
    ours, theirs = (torch.where(valid, gradient.double(), 0.0) for gradient in (step.gradient, step.expected))
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-300))
    rows = int((ours - theirs).abs().amax(-1).gt(1e-4 * scale).sum())
    observed = f"another one in {rows} of {len(ours)} rows, {factor:.3g} times as large on the whole"
    ids, atol = step.rows.sample_ids, 1e-4 * scale + 1e-12
    yield from differences(ours, theirs, ids, observed=observed, rtol=1e-3, atol=atol)


@check(
    culprit="stage update, clipping and accumulation",
    cure="accumulate first, then clip once, and clear gradients after the optimizer step alone",
    of_step=True,
)
def parameter_gradient(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The optimizer gets the sum over all backward passes of the step, clipped once and as a whole to the bound."""
    step, limit = evidence.step, evidence.facts.max_grad_norm
    if step is None or step.norm is None:
        yield Skip(UNSEEN if step is None else "parameters are followed on a single device alone")
        return
    pairs = [(trace.summed, trace.gradient) for trace in step.parameters.values() if trace.gradient is not None]
    summed, gradient = map(torch.cat, zip(*pairs, strict=True)) if pairs else (torch.zeros(0), torch.zeros(0))
    moving = len(summed) > 0 and float(summed.norm()) > 0
    factor = float((summed * gradient).sum() / summed.square().sum().clamp(min=1e-300))
    away = float((gradient - factor * summed).norm() / gradient.norm().clamp(min=1e-300))
    norms = [float(moments[1]) for moments in step.logged.get("optim/grad_norm", [])[-1:]]
    clipped = min(1.0, limit / norms[0]) if norms and norms[0] > 0 else None
    if moving and away > 0.02:
        observed = f"a gradient that is {away:.2g} of it away"
        yield Finding(expected="the sum over all microbatches, times one factor", observed=observed)
    elif step.norm > limit * 1.01:
        yield Finding(expected=f"a gradient norm of at most {limit:g}", observed=f"{step.norm:.4g}")
    elif moving and clipped is not None and abs(factor - clipped) > 0.02 * clipped:
        expected = f"gradients times {clipped:.3g}, as the logged norm says"
        yield Finding(expected=expected, observed=f"gradients times {factor:.3g}")


@check(
    cure="give the optimizer every parameter that trains, and step the scheduler once per optimizer step", of_step=True
)
def optimizer_moves(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Every parameter that got a gradient moves, and the scheduler steps once for an optimizer step."""
    step = evidence.step
    if step is None:
        yield Skip(UNSEEN)
        return
    if not step.parameters:
        yield Skip("parameters are followed on a single device alone")
    stuck = [name for name, parameter in step.parameters.items() if _is_stuck(parameter)]
    if stuck and any(map(_moves, step.parameters.values())):
        yield Finding(
            culprit=f"optimizer, parameter {stuck[0]}",
            expected="every trained parameter to move",
            observed=stuck[0] + (f" and {len(stuck) - 1} others" if len(stuck) > 1 else "") + " stood still",
        )
    if step.scheduler_steps not in (None, 1):
        expected, observed = "one step of the scheduler", f"{step.scheduler_steps}"
        yield Finding(culprit="scheduler", expected=expected, observed=observed)


def _moves(parameter: ParameterTrace) -> bool:
    before, after = parameter.before, parameter.after
    return before is not None and after is not None and not torch.equal(before, after)


def _is_stuck(parameter: ParameterTrace) -> bool:
    """Whether a parameter stands still though its gradient and learning rate would move it in its precision."""
    gradient, before = parameter.gradient, parameter.before
    if gradient is None or before is None or before.dtype not in (torch.float32, torch.float64) or _moves(parameter):
        return False
    size, unit = gradient.abs().clamp(max=1.0), torch.finfo(before.dtype).eps * before.abs().double()
    reachable = (size * max(parameter.lr, 1e-12) > REPRESENTABLE * unit) & (size > 1e-7)
    return bool(reachable.any()) if parameter.lr else bool((gradient != 0).any())


@check(cure="measure untouched values over the population that the metric is named after", of_step=True)
def logged_metrics(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What the core logs is what it says: recomputed from the finished rollout and from what the policy said in the
    step, over valid tokens, rewarded rows or real rows.
    """
    step = evidence.step
    if step is None:
        yield Skip(UNSEEN)
        return
    for name, values in {**_rollout_populations(evidence), **_step_populations(step)}.items():
        if name not in step.logged or not values.numel():
            continue
        counts, means, _, maxima = torch.stack([part.cpu() for part in step.logged[name]]).unbind(-1)
        count = float(counts.sum())
        truth, figure = float(values.double().mean()), float((counts * means).sum()) / max(count, 1.0)
        if name in MAXIMA:
            truth, figure = float(values.double().max()), float(maxima.max())
        if count != values.numel() or not abs(figure - truth) <= 1e-3 * max(abs(truth), 1e-2):
            yield Finding(
                culprit=f"metric {name}",
                expected=f"{truth:.6g} over {values.numel()}",
                observed=f"{figure:.6g} over {count:.0f}",
                samples=evidence.rollout.sample_ids[:2].tolist(),
            )


def _rollout_populations(evidence: Evidence) -> Mapping[str, Tensor]:
    rollout = evidence.rollout
    lengths, rewarded, valid = rollout.response_lengths[rollout.real], rollout.rewarded, rollout.valid_tokens
    advantages = rollout.require("advantages")[valid]
    return {
        "reward/task": rollout.rewards[rewarded],
        "length/mean": lengths,
        "length/max": lengths,
        "length/truncated": (rollout.finish == 1)[rollout.real],
        "advantage/mean": advantages,
        "advantage/max": advantages,
        "staleness/mean": (evidence.number - rollout.policy_version)[valid],
        **{f"reward/{name}": values[rewarded & ~values.isnan()] for name, values in rollout.task_rewards.items()},
    }


def _step_populations(step: StepEvidence) -> Mapping[str, Tensor]:
    """The values of each metric of the step, from what the policy said in it."""
    rows, valid, logprobs = step.rows, step.rows.valid_tokens, step.outputs.logprobs.double()
    populations = {"policy/entropy": step.outputs.entropy[valid]}
    populations |= {name: values[valid] for name, values in kl_values(rows, logprobs).items()}
    if rows.old_logprobs is not None:
        populations["policy/ratio_max"] = (logprobs - rows.old_logprobs.double())[valid].exp()
    if step.norm is not None:
        populations |= {name: part.double().reshape(1) for name, part in step.parts.items()}
    return populations
