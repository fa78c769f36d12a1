"""Checks of one optimizer step as it was made: denominators over all ranks, gradients, parameters, what was logged."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_rl.audit.checks.loss import name_of
from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding, differing
from lightning_rl.audit.recompute import weights_of_all
from lightning_rl.audit.trace import LiveStep, ParameterStep

REPRESENTABLE = 100.0  # a step has to be so many units in the last place for a parameter to have to move
ACCUMULATE = "stage update, the accumulation of microbatches"


@check("raw_fields", of_step=True)
def raw_fields(evidence: Evidence) -> list[Finding]:
    """No field of the finished rollout changes until its last optimizer step, by whatever way it is written."""
    return list(evidence.edits)


@check("rank_denominators", of_step=True)
def rank_denominators(evidence: Evidence) -> list[Finding]:
    """The weight of a token in a step is that of a reduction over the rows of all ranks at once, however they are split
    over ranks and microbatches.
    """
    step, reduction = evidence.live, evidence.subject.reduction
    if step is None or step.weights is None or not len(step.rows):
        return []
    expected = weights_of_all(step, reduction)
    samples, positions = differing(step.weights.cpu(), expected, step.rows.sample_ids)
    return [
        Finding(
            check="rank_denominators", culprit=f"reduction {name_of(reduction)}, or the sums over ranks",
            expected="denominators over the rows of all ranks", observed="others", samples=samples,
            positions=positions, cure="take every sum of a reduction through global_sum, and every row once",
        )
    ][: len(samples)]  # fmt: skip


@check("step_gradient", of_step=True)
def step_gradient(evidence: Evidence) -> list[Finding]:
    """The gradient that each log-probability of a step got is that of the whole step in one piece, computed from the
    finished rollout: nothing is scaled, left out, or recomputed between optimizer steps.
    """
    step = evidence.live
    if step is None or step.expected is None:
        return []
    expected, valid = step.expected.double(), step.rows.valid_tokens
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    ours, theirs = (torch.where(valid, one.double(), 0.0) for one in (step.gradient, expected))
    samples, positions = differing(ours, theirs, step.rows.sample_ids, rtol=1e-3, atol=1e-4 * scale + 1e-12)
    if not samples:
        return []
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-300))
    rows = int((ours - theirs).abs().amax(-1).gt(1e-4 * scale).sum())
    return [
        Finding(
            check="step_gradient", culprit=ACCUMULATE, samples=samples, positions=positions,
            expected="the gradient of the whole step in one piece",
            observed=f"another one in {rows} of {len(ours)} rows, {factor:.3g} times as large on the whole",
            cure="add up the microbatches' shares as they are, from the old log-probabilities of the rollout",
        )
    ]  # fmt: skip


@check("parameter_gradient", of_step=True)
def parameter_gradient(evidence: Evidence) -> list[Finding]:
    """The optimizer gets the sum over all backward passes of the step, clipped once and as a whole to the bound."""
    step, facts = evidence.live, evidence.subject.facts
    if step is None or step.norm is None:
        return []
    limit, known = facts.max_grad_norm, [one for one in step.parameters.values() if one.gradient is not None]
    summed = torch.cat([one.summed for one in known]) if known else torch.zeros(0)
    gradient = torch.cat([one.gradient for one in known if one.gradient is not None]) if known else torch.zeros(0)
    factor = float((summed * gradient).sum() / summed.square().sum().clamp(min=1e-300)) if len(summed) else 0.0
    away = float((gradient - factor * summed).norm() / gradient.norm().clamp(min=1e-300)) if len(summed) else 0.0
    logged = [float(moments[1]) for moments in step.logged.get("optim/grad_norm", [])[-1:]]
    found = []
    if len(summed) and float(summed.norm()) > 0 and away > 0.02:
        found.append(("the sum over all microbatches, times one factor", f"a gradient that is {away:.2g} of it away"))
    elif step.norm > limit * 1.01:
        found.append((f"a gradient norm of at most {limit:g}", f"{step.norm:.4g}"))
    elif len(summed) and logged and logged[0] > 0:
        expected = min(1.0, limit / logged[0])
        if abs(factor - expected) > 0.02 * expected and float(summed.norm()) > 0:
            found.append((f"gradients times {expected:.3g}, as the logged norm says", f"gradients times {factor:.3g}"))
    return [
        Finding(
            check="parameter_gradient", culprit="stage update, clipping and accumulation", expected=expected,
            observed=observed, samples=step.rows.sample_ids[:2].tolist(),
            cure="accumulate first, then clip once, and clear gradients after the optimizer step alone",
        )
        for expected, observed in found
    ]  # fmt: skip


@check("optimizer_moves", of_step=True)
def optimizer_moves(evidence: Evidence) -> list[Finding]:
    """Every parameter that got a gradient moves, and the scheduler steps once for an optimizer step."""
    step = evidence.live
    if step is None:
        return []
    stuck = [name for name, parameter in step.parameters.items() if _stuck(parameter)]
    moved = any(_moved(parameter) for parameter in step.parameters.values())
    found = []
    if stuck and moved:
        where = f"{stuck[0]} and {len(stuck) - 1} others" if len(stuck) > 1 else stuck[0]
        found.append((f"optimizer, parameter {stuck[0]}", "every trained parameter to move", f"{where} stood still"))
    if step.scheduler_steps not in (None, 1):
        found.append(("scheduler", "one step of the scheduler", f"{step.scheduler_steps}"))
    return [
        Finding(
            check="optimizer_moves", culprit=culprit, expected=expected, observed=observed,
            samples=step.rows.sample_ids[:2].tolist(),
            cure="give the optimizer every parameter that trains, and step the scheduler once per optimizer step",
        )
        for culprit, expected, observed in found
    ]  # fmt: skip


def _moved(one: ParameterStep) -> bool:
    return one.before is not None and one.after is not None and not torch.equal(one.before, one.after)


def _stuck(one: ParameterStep) -> bool:
    """Whether a parameter stands still though its gradient and learning rate would move it in its precision."""
    if (
        one.gradient is None
        or one.before is None
        or _moved(one)
        or one.before.dtype not in (torch.float32, torch.float64)
    ):
        return False
    least = one.gradient.abs().clamp(max=1.0)
    smallest = torch.finfo(one.before.dtype).eps * one.before.abs().double()
    reachable = (least * max(one.lr, 1e-12) > REPRESENTABLE * smallest) & (least > 1e-7)
    return bool(reachable.any()) if one.lr else bool((one.gradient != 0).any())


@check("logged_metrics", of_step=True)
def logged_metrics(evidence: Evidence) -> list[Finding]:
    """What the core logs is what it says: recomputed from the finished rollout and from what the policy said in the
    step, over valid tokens, rewarded rows or real rows.
    """
    step = evidence.live
    if step is None:
        return []
    found = []
    for name, (values, shown) in {**_of_rollout(evidence), **_of_step(step)}.items():
        if name not in step.logged or not values.numel():
            continue
        number, mean, largest = _merged(step.logged[name])
        truth = float(values.double().max() if shown == "max" else values.double().mean())
        said = largest if shown == "max" else mean
        close = abs(said - truth) <= 1e-3 * max(abs(truth), 1e-2)
        if number != values.numel() or not close:
            found.append((name, f"{truth:.6g} over {values.numel()}", f"{said:.6g} over {number:.0f}"))
    return [
        Finding(
            check="logged_metrics", culprit=f"metric {name}", expected=expected, observed=observed,
            samples=evidence.rollout.sample_ids[:2].tolist(),
            cure="measure untouched values over the population that the metric is named after",
        )
        for name, expected, observed in found
    ]  # fmt: skip


def _merged(moments: list[Tensor]) -> tuple[float, float, float]:
    stacked = torch.stack([own.cpu() for own in moments])
    number = float(stacked[:, 0].sum())
    return number, float((stacked[:, 0] * stacked[:, 1]).sum()) / max(number, 1.0), float(stacked[:, 3].max())


Population = tuple[Tensor, str]


def _of_rollout(evidence: Evidence) -> Mapping[str, Population]:
    rollout = evidence.rollout
    lengths, rewarded, valid = rollout.response_lengths[rollout.real], rollout.rewarded, rollout.valid_tokens
    advantages = rollout.required("advantages")[valid]
    found = {
        "reward/task": (rollout.rewards[rewarded], "mean"), "length/mean": (lengths, "mean"),
        "length/max": (lengths, "max"), "length/truncated": ((rollout.finish == 1)[rollout.real], "mean"),
        "advantage/mean": (advantages, "mean"), "advantage/max": (advantages, "max"),
        "staleness/mean": ((evidence.cycle - rollout.policy_version)[valid], "mean"),
    }  # fmt: skip
    raw = {f"reward/{name}": values[rewarded & ~values.isnan()] for name, values in rollout.task_rewards.items()}
    return found | {name: (values, "mean") for name, values in raw.items()}


def _of_step(step: LiveStep) -> Mapping[str, Population]:
    rows, said = step.rows, step.outputs
    valid, logprobs = rows.valid_tokens, said.logprobs.double()
    found = {"policy/entropy": (said.entropy[valid], "mean")}
    if rows.ref_logprobs is not None:
        found["kl/ref"] = ((logprobs - rows.ref_logprobs.double())[valid], "mean")
    for name, other in (("kl/old", rows.old_logprobs), ("kl/rollout", rows.rollout_logprobs)):
        if other is not None:
            gap = (logprobs - other.double())[valid]
            found[name] = (gap.exp() - 1 - gap, "mean")
            if name == "kl/old":
                found["policy/ratio_max"] = (gap.exp(), "max")
    if step.norm is not None:
        found |= {name: (part.double().reshape(1), "mean") for name, part in step.parts.items()}
    return found
