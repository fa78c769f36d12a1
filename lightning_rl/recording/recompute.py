"""Replay: recompute the signal, loss and gradient of a recorded rollout without a model or Trainer.

The stages are the functions of the run; recorded log-probabilities replace the policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import OUTPUTS, LossView, Outputs, ReplayCorrections, StepTrace
from lightning_rl.distributed import Collectives
from lightning_rl.distributed.threaded_ranks import ThreadedRanks
from lightning_rl.policy.plan import Plan, join_parts, plan_of_rows, row_of
from lightning_rl.recording.recording import Recording
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.estimate_signal import estimate_advantages, exclude_rows
from lightning_rl.serialization import ARGUMENTS, restore
from lightning_rl.update import accumulate_gradient, from_table


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of an algorithm on a recorded rollout.

    Attributes:
        rollout: Rollout with masks, advantages and returns.
        shaped: Shaped reward [B, T].
        parts: For each optimizer step, this rank's share of the loss parts, float64; empty for a step without tokens.
        gradients: For each pass, gradient of the loss with respect to the log-probabilities [B, T].
        rejected: For each pass, valid tokens that the policy loss ignores, [B, T] bool.
        views: For each optimizer step, inputs of the loss of each microbatch, with the rows of the plan.
    """

    rollout: Rollout
    shaped: Tensor
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    rejected: list[Tensor] = field(default_factory=list)
    views: list[list[LossView]] = field(default_factory=list)


def replay(recordings: Sequence[Recording], algorithms: Sequence[Algorithm], *, restore: bool = True) -> list[Replayed]:
    """Recompute a rollout, bitwise equal to a recording on CPU.

    Args:
        recordings: Recordings of all ranks.
        algorithms: One algorithm per rank, without shared objects.
        restore: Restore the recorded states of the corrections; False for another algorithm.
    """
    ranks = ThreadedRanks(len(recordings))
    jobs = [
        partial(_replay, recording, algorithm, ranks, restore=restore)
        for recording, algorithm in zip(recordings, algorithms, strict=True)
    ]
    return ranks.run(jobs, threads=recordings[0].header["threads"])


def _replay(recording: Recording, algorithm: Algorithm, collectives: Collectives, *, restore: bool) -> Replayed:
    algorithm = algorithm.replace(corrections=ReplayCorrections(algorithm.corrections.callbacks, collectives))
    if restore:
        load_states(algorithm, recording.header["states"])
    replayed = _replay_signal(recording, algorithm, collectives)
    rollout, packed = replayed.rollout, recording.header["options"]["model"][ARGUMENTS]["packing"]
    trained = rollout.trained.tolist()  # this algorithm may exclude other rows
    planned = recording.header["plan"] if algorithm.token_wise else join_parts(recording.header["plan"])
    rows = [[[entry for entry in rows if trained[row_of(entry)]] for rows in step] for step in planned]
    plan = plan_of_rows(rollout, rows, packed=packed)
    for number, step in enumerate(recording.header["steps"]):
        if number % recording.minibatches == 0:
            logprobs = recording.of_step(number, "logprobs")
            replayed.gradients.append(torch.zeros_like(replayed.shaped if logprobs is None else logprobs))
            replayed.rejected.append(torch.zeros_like(rollout.valid_tokens))
        if restore:
            load_states(algorithm, step["states"] or {})
        made = step["states"] is not None
        replayed.views.append([])
        replayed.parts.append(_replay_step(recording, number, plan, replayed, algorithm, collectives) if made else {})
    return replayed


def load_states(algorithm: Algorithm, states: Mapping[str, Any]) -> None:
    """Restore the recorded states of the corrections."""
    for callback in algorithm.corrections.callbacks:
        if callback.name in states:
            callback.load_state_dict(restore(states[callback.name]))


def _replay_signal(recording: Recording, algorithm: Algorithm, collectives: Collectives) -> Replayed:
    """Compute the masks, then the signal, with the functions of the run."""
    rollout, corrections = recording.rollout, algorithm.corrections
    sampled = rollout.replace(
        trained=rollout.real & ~rollout.failed,
        rewarded=recording.tensors["sampled/scored"],
        valid_tokens=rollout.action_mask,
        advantages=None,
        returns=None,
    )
    sampled = sampled.replace(rewarded=sampled.rewarded & corrections.reward_mask(sampled))
    masked, _ = exclude_rows(sampled, corrections)
    signalled, rewards, _ = estimate_advantages(masked, algorithm.advantages, corrections, collectives.sum)
    return Replayed(signalled, rewards.shaped)


def _replay_step(
    recording: Recording, number: int, plan: Plan, replayed: Replayed, algorithm: Algorithm, collectives: Collectives
) -> dict[str, Tensor]:
    recorded: dict[str, Any] = {spec.output: recording.of_step(number, spec.output) for spec in OUTPUTS}
    table, scale = recorded["logprobs"].clone().requires_grad_(), recording.header["steps"][number]["scale"]
    trace = StepTrace(rollout_number=recording.header["rollout"], step=number)
    gradient = accumulate_gradient(
        replayed.rollout,
        plan.step(number),
        from_table(Outputs(**recorded | {"logprobs": table})),
        algorithm,
        backward=lambda loss: (loss * scale).backward() if loss.requires_grad else None,
        collectives=collectives,
        trace=trace,
    )
    if table.grad is not None:
        replayed.gradients[-1].add_(table.grad)
    for microbatch, seen in zip(plan.step(number), trace.microbatches, strict=True):
        replayed.views[-1].append(seen.view)
        view = seen.view.sanitize()
        factor = algorithm.corrections.policy_factor(view).factor
        if factor is not None and len(microbatch.index):
            replayed.rejected[-1][microbatch.index, : view.width] |= (factor == 0) & view.valid_tokens
    return gradient.parts
