"""Training of a rollout: its log-probabilities and advantages, and the gradient of each optimizer step."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_rl.corrections import Stat
from lightning_rl.data import StepIndex
from lightning_rl.data.prompt_checks import is_chat
from lightning_rl.distributed import process_maximum
from lightning_rl.policy import make_plan
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import staleness
from lightning_rl.rollouts.estimate_signal import check_domains, estimate_signal, exclude_rows
from lightning_rl.rollouts.first_sample import first_sample
from lightning_rl.rollouts.logprob_passes import add_logprobs, environment_logprob
from lightning_rl.rollouts.nonfinite import recording_nonfinite
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.run.run import Run
from lightning_rl.samples import Trajectory
from lightning_rl.update import StepGradient, accumulate_gradient
from lightning_rl.utils.template_date import TODAY, writes_date

Backward = Callable[[Tensor], None]


def show_sample(run: Run, samples: Sequence[Trajectory], number: int) -> None:
    """Print a prompt and a response of the first rollout of a fit, with its number, on rank zero.

    Control tokens are printed, too.
    """
    if run.log.shows_sample:
        tokenizer = run.options.tokenizer
        lines = [f"{name} of rollout {number}, {text}" for name, text in first_sample(samples, tokenizer)]
        uses_template = run.environments is not None or is_chat(run.data.first())
        if uses_template and writes_date(tokenizer):
            lines.append(f"the chat template writes the date of {TODAY.text('%Y-%m-%d')}, which checkpoints keep")
        run.log.shows_sample = False
        if lines:
            rank_zero_info("\n".join(lines))


def finish_rollout(run: Run, rollout: Rollout, number: int) -> tuple[CurrentRollout, dict[str, Stat]]:
    """Add plan, log-probabilities and advantages, and pass the rollout to observers; return it and its metrics."""
    policy, corrections, needs, packed = run.policy, run.corrections, run.needs, run.models.options.packing
    if run.models.processor is not None:
        run.models.processor.check_rows(rollout)
    with run.log.times.phase("score"), run.parallel.strategy.precision_plugin.forward_context():
        rollout, stats = exclude_rows(rollout, corrections)
        plan_of = partial(
            make_plan,
            max_tokens_per_microbatch=run.progress.max_tokens_per_microbatch,
            packed=packed,
            by_sequence=run.algorithm.token_wise,
            max_over_ranks=run.progress.max_over_ranks,
        )
        plan = plan_of(rollout, minibatches=run.options.minibatches_per_rollout)
        if run.environments is not None:
            stats |= {"env/logprob": environment_logprob(rollout, policy, plan_of)}
        rollout, plan = rollout.to(run.device), plan.to(run.device)
        passes = {"old": needs.old_logprobs, "squares": needs.sum_pi_squared}
        passes |= {"rollout_as_old": needs.rollout_as_old, "loads": needs.expert_load}
        scorers, global_sum = (policy, run.models.reference, corrections), run.parallel.collectives.sum
        rollout = add_logprobs(rollout, plan, *scorers, **passes, global_sum=global_sum)
        if needs.expert_load:  # the layouts carry it
            plan = plan_of_rows(rollout.to("cpu"), plan.rows(), packed=packed).to(run.device)
    with run.log.times.phase("signal"):
        estimator = run.algorithm.advantages
        rollout, rewards, signal = estimate_signal(rollout, estimator, corrections, global_sum)
        check_domains(rollout, rewards.scores, estimator, corrections)
    current = CurrentRollout.of(number, rollout, plan)
    corrections.observe(rollout)
    return current, {**stats, **signal, **staleness(rollout, number), **corrections.rollout_metrics(rollout)}


def take_step(run: Run, step_index: StepIndex, optimizer: LightningOptimizer, backward: Backward) -> StepGradient:
    """Take an optimizer step, unless no rank has a token to train on or the gradient is not finite."""
    progress, parallel = run.progress, run.parallel
    current = cast(CurrentRollout, progress.current)
    current.check_edits()
    run.seed(step_index)
    tokens = int(parallel.collectives.sum(torch.tensor(current.plan.tokens(step_index.step), device=run.device)))
    if not tokens:
        return StepGradient(trace=run.log.begin_trace(step_index, run.corrections, parallel))
    with run.ahead.spans.of(step_index.rollout).current(), run.log.times.phase("update"):
        step = gradient(run, step_index, backward)
        step.lr, step.tokens = float(optimizer.param_groups[0]["lr"]), tokens
        with (
            recording_nonfinite(run.trainer, cast(CurrentRollout, progress.current), step_index.step, step),
            run.log.lost_updates.watch(run.policy.parameters(), step.lr),
        ):
            step.norm = parallel.step(run.policy, optimizer, partial(progress.accept, step))
    run.models.stepped = True
    return step


def gradient(run: Run, step_index: StepIndex, backward: Backward) -> StepGradient:
    """Return the gradient of a step; repeat with half ``max_tokens_per_microbatch`` if a rank is out of memory.

    Raises:
        torch.OutOfMemoryError: If the step is out of memory again, or cannot be repeated; a note names the cure.
    """
    states = run.corrections.states() if run.parallel.repeats_steps else None
    try:
        step = accumulate(run, step_index, backward, record_out_of_memory=states is not None)
        if states is not None and process_maximum(int(step.out_of_memory)):
            run.policy.zero_grad()
            run.progress.halve_microbatches(step_index, states, by_sequence=run.algorithm.token_wise)
            run.seed(step_index)
            step = accumulate(run, step_index, backward)
    except torch.OutOfMemoryError as error:
        error.add_note(run.progress.memory_note())
        raise
    if not run.models.stepped:
        _warn_without_gradient(step)
    return step


def accumulate(
    run: Run, step_index: StepIndex, backward: Backward, *, record_out_of_memory: bool = False
) -> StepGradient:
    """Accumulate the gradient of a step over its microbatches."""
    parallel, policy, current = run.parallel, run.policy, cast(CurrentRollout, run.progress.current)
    return accumulate_gradient(
        current.rollout,
        current.plan.step(step_index.step),
        lambda microbatch: policy(microbatch.layout),
        run.algorithm,
        backward=lambda loss: backward(loss * parallel.ranks),  # cancels the mean over ranks
        around=lambda last: parallel.accumulating(policy, last=last),
        collectives=parallel.collectives,
        trace=run.log.begin_trace(step_index, run.corrections, parallel),
        bitwise=run.needs.rollout_as_old and step_index.step == 0,
        record_out_of_memory=record_out_of_memory,
    )


def _warn_without_gradient(step: StepGradient) -> None:
    if names := sorted({name for name, is_not_zero in step.untrained if is_not_zero}):
        warnings.warn(
            f"expected a gradient of {' and '.join(names)}, got none, so it trains nothing: compute it from "
            "view.logprobs without detach(), .data, .item() or no_grad",
            stacklevel=2,
        )
