"""Checks of one optimizer step: rows, forward, gradients, parameters and logged metrics."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.optimizer_rules import Move, moves_by_rule
from lightning_rl.audit.parameter_tracer import ParameterTrace
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip, differences, rounding
from lightning_rl.testing.properties.definitions import figure_of, is_figure
from lightning_rl.utils.finding import Finding

UNSEEN = "no optimizer step was traced: it had no valid token, its gradient was not finite, or a scaler is used"
ONE_DEVICE = "parameters are traced on a single device only"
REPRESENTABLE = 100.0  # units in the last place from which on an update has to move a parameter
FEW, MANY = 0.02, 0.25  # tolerated share of wrong entries, of all and of one parameter
SCORE = "stage score, the policy before the update"
NAMED = 3  # missing metrics per finding


@check(cure="", of_step=True)
def raw_fields(evidence: Evidence) -> Sequence[Finding]:
    """No field of the finished rollout changes until its last optimizer step."""
    return [edit for edit in evidence.edits if edit.check == "raw_fields"]


@check(cure="", of_step=True)
def quiet_hooks(evidence: Evidence) -> Sequence[Finding]:
    """Hooks of callbacks and modules change no gradient, weight, optimizer state or metric, and freeze nothing.

    They may set the learning rate. If a rank holds all weights, these and the optimizer state also stay the same
    between steps, so validation and saving must restore their changes.
    """
    return [edit for edit in evidence.edits if edit.check == "quiet_hooks"]


@check(cure="", of_step=True)
def resumed_state(evidence: Evidence) -> Sequence[Finding]:
    """After loading a checkpoint, a run has its weights, optimizer, schedule, cursor, fields of the rollout and states
    of corrections.

    Subclasses of corrections save what their parents save.
    """
    return [edit for edit in evidence.edits if edit.check == "resumed_state"]


@check(cure="", of_step=True)
def logged_evaluations(evidence: Evidence) -> Sequence[Finding]:
    """``reward/task`` and ``pass@k`` of an evaluation follow from its rewards, and one sample per prompt is greedy.

    Each request has the tokens and pictures of its prompt.
    """
    return [edit for edit in evidence.edits if edit.check == "logged_evaluations"]


@check(
    culprit="stage update, the microbatches of the step",
    cure="run every microbatch of the plan once, with every trained row once in each pass",
    of_step=True,
)
def step_rows(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The rows of a step are those of the plan, and a pass contains each trained row once.

    The model reads the tokens, positions, pictures and other inputs that follow from the rows of each microbatch.
    """
    step, rollout = evidence.step, evidence.rollout
    if step is not None and step.other_inputs:
        samples = [*dict.fromkeys(sample for each in step.other_inputs.values() for sample in each)]
        yield Finding(
            expected="the inputs of the model that follow from the rows of each microbatch",
            observed=f"another {', '.join(sorted(step.other_inputs))} in the microbatches of {len(samples)} rows",
            cure="read tokens, positions and pictures from the rows of the plan, in every step",
            samples=samples[:4],
        )
    if step is None or step.planned is None:
        yield Skip(UNSEEN)
        return
    ours, theirs = sorted(step.rows.sample_ids.tolist()), sorted(step.planned.tolist())
    if ours != theirs:
        yield _row_change(ours, theirs, "the rows of the plan", step.blamed.get("plan", ""))
        return
    size, number = evidence.facts.minibatches, step.number + 1
    steps = range(number - size, number)
    if number % size or not all(each in step.passes for each in steps):
        return  # checked with the last step of a pass
    ours = sorted(sample for each in steps for sample in step.passes[each].tolist())
    theirs = sorted(rollout.sample_ids[rollout.trained & rollout.valid_tokens.any(-1)].tolist())
    idle = set(rollout.sample_ids.tolist()) - set(theirs)  # rows without a valid token
    ours = [sample for sample in ours if sample not in idle]
    if ours != theirs:
        yield _row_change(ours, theirs, "every trained row once in a pass", step.blamed.get("plan", "stage plan"))


def _row_change(ours: list[int], theirs: list[int], expected: str, culprit: str = "") -> Finding:
    missing = [sample for sample in theirs if sample not in ours]
    others = [sample for sample in ours if ours.count(sample) != theirs.count(sample)]
    observed = f"{len(ours)} rows instead of {len(theirs)}, {len(missing)} of which are missing"
    return Finding(culprit=culprit, expected=expected, observed=observed, samples=[*missing, *others][:4])


@check(
    culprit="stage update, the policy's forward in training",
    cure="score and update with the same microbatches, weights, mode, precision and temperature, without dropout",
    of_step=True,
)
def first_forward(evidence: Evidence) -> Iterator[Finding | Skip]:
    """In the first step of a rollout the update's forward returns the scored log-probabilities and values.

    So the ratio of current to old policy is 1.
    """
    step, bound = evidence.step, evidence.facts.tolerance / 10
    if step is None or step.number:
        yield from [Skip(UNSEEN)] if step is None else []
        return
    rows, outputs = step.rows, step.outputs
    pairs = [("log-probabilities", rows.old_logprobs, outputs.logprobs), ("values", rows.values, outputs.values)]
    if rows.old_logprobs is None and evidence.outputs is not None:
        shared = torch.isin(rows.sample_ids, evidence.rows.sample_ids)
        order = [evidence.rows.sample_ids.tolist().index(sample) for sample in rows.sample_ids[shared].tolist()]
        width = min(rows.width, evidence.rows.width)
        scored = torch.zeros_like(outputs.logprobs)
        scored[shared, :width] = evidence.outputs.logprobs[order, :width].to(scored.dtype)
        scored = torch.where(shared[:, None], scored, outputs.logprobs)
        pairs[0] = ("log-probabilities", scored, outputs.logprobs)
    for what, before, now in pairs:
        if before is None or now is None or not before.numel():
            continue
        theirs, ours = (torch.where(rows.valid_tokens, part, 0.0) for part in (before, now))
        yield from differences(
            ours,
            theirs,
            rows.sample_ids,
            culprit=SCORE if _is_scored_otherwise(evidence, what, bound) else "",
            expected=f"the {what} that were scored before the first step",
            observed=f"others, up to {float((ours - theirs).abs().max()):.3g} apart",
            rtol=0.0,
            atol=bound * (1.0 + (float(theirs.abs().max()) if what == "values" else 0.0)),
        )


def _is_scored_otherwise(evidence: Evidence, what: str, bound: float) -> bool:
    """Return True if the pass before the update differs from the forward that the audit repeats."""
    rows, outputs = evidence.rows, evidence.outputs
    if outputs is None:
        return False
    before, now = (rows.values, outputs.values) if what == "values" else (rows.old_logprobs, outputs.logprobs)
    if before is None or now is None:
        return False
    size = before.nan_to_num().abs() if what == "values" else 0.0
    return bool((torch.where(rows.valid_tokens, now - before, 0.0).abs() > bound * (1.0 + size)).any())


@check(
    culprit="reduction {reduction}, or the sums over ranks",
    expected="denominators over the rows of all ranks",
    cure="compute every sum of a reduction with global_sum, and count every row once",
    of_step=True,
)
def rank_denominators(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The weight of a token is that of a reduction over the rows of all ranks, for every split."""
    step = evidence.step
    if step is None or step.weights is None or not len(step.rows):
        yield Skip(UNSEEN if step is None else "this rank had no rows in the step")
        return
    weights = step.weights_over_ranks(evidence.algorithm.reduction)
    yield from differences(step.weights.cpu(), weights, step.rows.sample_ids)


@check(
    culprit="stage update, the accumulation of microbatches",
    expected="the gradient of the whole step in one piece",
    cure="add up the microbatches unscaled, with the old log-probabilities of the rollout",
    of_step=True,
)
def step_gradient(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The gradients of log-probabilities, entropy and values are those of the step recomputed in one piece."""
    step = evidence.step
    if step is None or step.recomputed is None:
        yield Skip(UNSEEN if step is None else step.unknown)
        return
    again = step.recomputed
    pairs = [("log-probability", step.gradient, again.gradient)]
    pairs += [(name, step.further[name], theirs) for name, theirs in again.further.items() if name in step.further]
    for what, gradient, expected in pairs:
        valid, scale = step.rows.valid_tokens, float(expected.abs().max()) if expected.numel() else 0.0
        ours, theirs = (torch.where(valid, part.double(), 0.0) for part in (gradient, expected))
        factor = float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-300))
        rows = int((ours - theirs).abs().amax(-1).gt(1e-4 * scale).sum())
        observed = f"another one of the {what} in {rows} of {len(ours)} rows, {factor:.3g} times as large overall"
        atol, rtol = rounding(gradient.dtype, scale, 1024), rounding(gradient.dtype, 1.0, 4096)
        yield from differences(
            ours,
            theirs,
            step.rows.sample_ids,
            culprit=_backward_culprit(evidence, step, what, ours, theirs),
            observed=observed,
            rtol=rtol,
            atol=atol,
        )


def _backward_culprit(evidence: Evidence, step: StepEvidence, what: str, ours: Tensor, theirs: Tensor) -> str:
    """Return the code that changed a gradient of a step, as a culprit."""
    if "backward" in step.blamed:
        return step.blamed["backward"]
    if what == "current_values":
        return "the critic: its value head, or the value loss"
    order = step.rows.valid_tokens.cumsum(-1)
    last = step.rows.valid_tokens & (order == order[:, -1:])
    forgotten = (ours == 0) & (theirs != 0)
    if forgotten.any() and not (forgotten & ~last).any():
        return f"loss {evidence.names['loss']}, or the backward, at the last token of each response"
    return ""


@check(
    culprit="stage update, clipping and accumulation",
    cure="accumulate first, then clip once, and clear gradients only after the optimizer step",
    of_step=True,
)
def parameter_gradient(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The optimizer gets the sum over all backward passes in the precision of the parameters, clipped once.

    Every parameter with a sum has a gradient.
    """
    step, limit = evidence.step, evidence.facts.max_grad_norm
    if step is None or step.norm is None or not step.parameters:
        yield Skip(UNSEEN if step is None else ONE_DEVICE)
        return
    culprit = step.blamed.get("gradients") or (_stepper(step) if _edited_within(step, limit) else "")
    lost = [name for name, one in step.parameters.items() if one.gradient is None and bool((one.summed != 0).any())]
    if lost:
        expected, observed = (
            f"a gradient of {lost[0]}",
            f"none, nor of {len(lost) - 1} others, although backward passes computed them",
        )
        yield Finding(culprit=culprit, expected=expected, observed=observed)
    if step.silent:
        yield Finding(
            culprit=f"policy, its parameter {step.silent[0]}, which its forward detaches",
            expected=f"a gradient of {step.silent[0]}, on which trained outputs depend",
            observed=f"none, or 0 everywhere, as of {len(step.silent) - 1} others",
        )
    followed = {name: one for name, one in step.parameters.items() if one.gradient is not None}
    if not followed:
        return
    summed, gradient = (torch.cat([getattr(one, name) for one in followed.values()]) for name in ("summed", "gradient"))
    factor = float((summed * gradient).sum() / summed.square().sum().clamp(min=1e-300))
    norms = [float(moments[1]) for moments in step.logged.get("optim/grad_norm", [])[-1:]]
    clipped = min(1.0, limit / norms[0]) if norms and norms[0] > 0 else None
    slack = torch.cat([one.summed if one.magnitude is None else one.magnitude for one in followed.values()]).abs()
    passes = max(one.passes for one in followed.values())
    coarsest = max((one.dtype or torch.float32 for one in followed.values()), key=lambda dtype: torch.finfo(dtype).eps)
    precise = max(1e-3, torch.finfo(coarsest).eps)
    away = (gradient - factor * summed).abs() > abs(factor) * rounding(coarsest, slack, passes + 4) + 1e-30
    misses = dict(zip(followed, away.split([len(one.summed) for one in followed.values()]), strict=True))
    if (where := _place_of(misses)) is not None:
        observed = f"another one at {int(away.sum())} of {len(away)} entries, such as of {where}"
        yield Finding(culprit=culprit, expected="the sum over all microbatches, times one factor", observed=observed)
    elif step.norm > limit * 1.01:
        yield Finding(culprit=culprit, expected=f"a gradient norm of at most {limit:g}", observed=f"{step.norm:.4g}")
    elif clipped is not None and bool((summed != 0).any()) and abs(factor - clipped) > precise * clipped:
        expected = f"gradients times {clipped:.3g}, as the logged norm says"
        yield Finding(culprit=culprit, expected=expected, observed=f"gradients times {factor:.3g}")


def _edited_within(step: StepEvidence, limit: float) -> bool:
    """Return True if the optimizer used other gradients than those at its call, clipped or not."""
    pairs = [(one.unclipped, one.gradient) for one in step.parameters.values() if one.unclipped is not one.gradient]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    factors = (1.0, min(1.0, limit / max(step.unclipped_norm or 0.0, 1e-30)))
    if len(both) < len(pairs) or not both:
        return len(both) < len(pairs)
    before, used = (torch.cat(parts) for parts in zip(*both, strict=True))
    return not any(torch.allclose(before * factor, used, rtol=1e-3, atol=0.0) for factor in factors)


def _place_of(misses: Mapping[str, Tensor]) -> str | None:
    """Return the parameter with most wrong entries, if they are many of it or some of all; else None."""
    if not any(map(len, misses.values())):
        return None
    everywhere = float(torch.cat(list(misses.values())).double().mean())
    if not everywhere:
        return None
    shares = {name: float(miss.double().mean()) for name, miss in misses.items() if len(miss)}
    worst = max(shares, key=shares.__getitem__, default=None)
    return worst if worst is not None and (shares[worst] > MANY or everywhere > FEW) else None


@check(
    cure="give the optimizer every parameter that trains, and step the scheduler once per optimizer step", of_step=True
)
def optimizer_moves(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Every parameter with a gradient moves, none gets frozen, and the scheduler steps once per optimizer step."""
    step = evidence.step
    if step is None:
        yield Skip(UNSEEN)
        return
    if not step.parameters:
        yield Skip(ONE_DEVICE)
    stuck = [name for name, parameter in step.parameters.items() if _is_stuck(parameter)]
    if stuck:
        yield Finding(
            culprit=f"{_stepper(step)}, parameter {stuck[0]}",
            expected="every trained parameter to move",
            observed=stuck[0] + (f" and {len(stuck) - 1} others" if len(stuck) > 1 else "") + " did not move",
        )
    if step.stepping.uphill:
        yield Finding(
            culprit=_stepper(step),
            expected="weights that move against the gradient of the loss",
            observed="weights that moved along it in every audited step",
        )
    if step.frozen:
        yield Finding(
            culprit=step.blamed.get("trained parameters", f"parameter {step.frozen[0]}, frozen during the fit"),
            expected="every parameter to stay trainable",
            observed=f"{step.frozen[0]} and {len(step.frozen) - 1} others without a gradient",
        )
    if step.scheduler_steps not in (None, 1):
        expected, observed = "one step of the scheduler", f"{step.scheduler_steps}"
        yield Finding(culprit=step.blamed.get("optimizer", "scheduler"), expected=expected, observed=observed)


def _is_stuck(parameter: ParameterTrace) -> bool:
    """Return True if a parameter did not move although the update is representable in its precision."""
    gradient, before, after = parameter.gradient, parameter.before, parameter.after
    if gradient is None or before is None or before.dtype not in (torch.float32, torch.float64):
        return False
    if after is not None and not torch.equal(before, after):
        return False
    if not parameter.held:
        return bool((gradient != 0).any())
    size, unit = gradient.abs().clamp(max=1.0), torch.finfo(before.dtype).eps * before.abs().double()
    return bool(((size * parameter.lr > REPRESENTABLE * unit) & (size > 1e-7)).any())


@check(
    cure="step once per optimizer step, at the logged rate, in a precision that can represent the step",
    of_step=True,
)
def optimizer_rule(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Every parameter moves by the optimizer's rule on its gradient and state, computed in float64.

    No step is repeated, skipped, at another rate or at a rate of 0, or lost in the precision of the weights.
    """
    step = evidence.step
    if step is None or not step.parameters:
        yield Skip(UNSEEN if step is None else ONE_DEVICE)
        return
    culprit, stepping = _stepper(step), step.stepping
    if stepping.idle:
        yield Finding(
            culprit=stepping.rate_setter or culprit,
            expected="a learning rate above 0",
            observed=f"0 for {stepping.idle} in the latest audited rollouts",
            cure="end the run where its schedule ends, or set a rate above 0: at 0 nothing trains",
        )
    if stepping.steps > 1:
        expected, observed = "one step of the optimizer at a time", f"{stepping.steps} by its own count"
        yield Finding(culprit=culprit, expected=expected, observed=observed)
    held = {name: one for name, one in step.parameters.items() if one.held}
    rule = stepping.rule or step.optimizer
    known = moves_by_rule(rule, held)
    if any(one.gradient is not None and name not in known for name, one in held.items()):
        yield Skip(f"the rule of {step.optimizer or 'the optimizer'} with these options is unknown")
    yield from _rule_findings(step, known, culprit)


def _stepper(step: StepEvidence) -> str:
    """Return the code that changed the update of the weights, as a culprit."""
    edits = [step.blamed[what] for what in ("weights", "optimizer", "hooked gradients") if what in step.blamed]
    return edits[0] if edits else f"optimizer {step.optimizer}"


def _rule_findings(step: StepEvidence, known: Mapping[str, Move], culprit: str) -> Iterator[Finding]:
    if not known:
        return
    earlier, later = ([getattr(step.parameters[name], when) for name in known] for when in ("before", "after"))
    before, after = torch.cat(earlier).double(), torch.cat(later).double()
    move, slack = (torch.cat([known[name][place] for name in known]) for place in (0, 1))
    ours, wanted = after - before, move != 0
    units = [torch.finfo(one.dtype).eps for one in earlier]
    lengths = torch.tensor([len(one) for one in earlier], device=before.device)
    unit = before.abs() * before.new_tensor(units).repeat_interleave(lengths)
    lost = wanted & (ours == 0) & (move.abs() < unit)
    if int(wanted.sum()) and float(lost.sum()) > 0.5 * float(wanted.sum()):
        dtype = str(earlier[0].dtype).removeprefix("torch.")
        yield Finding(
            culprit=culprit,
            expected=f"weights that can represent a step of {float(move[wanted].abs().median()):.2g}",
            observed=f"{int(lost.sum())} of {int(wanted.sum())} entries did not move: the step is lost in {dtype}",
        )
        return
    away = (ours - move).abs() > slack
    misses = dict(zip(known, away.split([len(known[name].by) for name in known]), strict=True))
    if (where := _place_of(misses)) is not None:
        factor = float((ours * move).sum() / move.square().sum().clamp(min=1e-300))
        yield Finding(
            culprit=culprit,
            expected="the move of the rule from gradient, state and rate",
            observed=f"{factor:.3g} times as much overall, another one at {int(away.sum())} of {len(away)} entries"
            f", such as of {where}",
        )


@check(cure="measure unmodified values over the population that the metric is named after", of_step=True)
def logged_metrics(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Logged metrics and rows equal those recomputed from the rollout and the policy's outputs in the step."""
    step = evidence.step
    if step is None or (not step.logged and step.unknown):
        yield Skip(UNSEEN if step is None else step.unknown)
        return
    samples, culprit, wrong = evidence.rollout.sample_ids[:2].tolist(), step.blamed.get("metrics"), set[str]()
    largest = _largest_logprob(step)
    for name, stat in step.figures.items():
        if name not in step.logged or not float(stat.moments[0]):
            continue
        count, figure = figure_of(step.logged[name], stat.reduction)
        if count != float(stat.moments[0]) or not is_figure(figure, stat, largest):
            wrong.add(name)
            yield Finding(
                culprit=culprit or f"metric {name}",
                expected=f"{name} = {stat.value():.6g} over {float(stat.moments[0]):.0f}",
                observed=f"{figure:.6g} over {count:.0f}",
                samples=samples,
            )
    for name in step.missing[:NAMED]:
        expected, observed = f"{name} in the row, since it was logged", "a row without it"
        yield Finding(culprit=culprit or f"metric {name}", expected=expected, observed=observed, samples=samples)
    if not step.row_figures:
        yield Skip("no row was logged with this step, or it spans ranks or steps that were not audited")
    for name, stat in step.row_figures.items():
        for place, row in step.row.items():
            if name in row and name not in wrong and not is_figure(row[name], stat, largest):
                yield Finding(
                    culprit=culprit or f"metric {name}",
                    expected=f"{name} = {stat.value():.6g} in {place}",
                    observed=f"{row[name]:.6g}",
                    samples=samples,
                )


def _largest_logprob(step: StepEvidence) -> float:
    """Return the largest absolute log-probability of any policy in the step."""
    rows = step.rows
    policies = (step.outputs.logprobs, rows.rollout_logprobs, rows.old_logprobs, rows.ref_logprobs)
    sizes = [one[rows.valid_tokens].abs() for one in policies if one is not None]
    return float(torch.cat(sizes).nan_to_num(0.0).max()) if rows.valid_tokens.any() else 0.0
