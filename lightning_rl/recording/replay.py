"""Replay: the signal, the loss and its gradient of a recorded rollout, computed again without a model or a Trainer.

The stages are those of the run, from the same functions; recorded log-probabilities stand in the place of the policy.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.advantages import RewardSignal
from lightning_rl.corrections import Corrections, LossView, RLCallback
from lightning_rl.corrections.provided import Provided
from lightning_rl.policy import Layout, Outputs, PolicyModel
from lightning_rl.policy.plan import Plan, plan_of_rows
from lightning_rl.recording.configuration import Configuration
from lightning_rl.recording.recording import Recording
from lightning_rl.recording.serialize import rebuilt
from lightning_rl.recording.threaded_ranks import Lockstep
from lightning_rl.rollout import Finish, Rollout
from lightning_rl.rollouts.signal import Spy, estimate_signal, exclude_rows
from lightning_rl.update import accumulated


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a configuration makes of a recorded rollout.

    Attributes:
        rollout: with its masks, advantages and returns.
        shaped: the shaped reward, [B, T].
        parts: of each optimizer step, this rank's share of the loss's parts, float64; empty for a step without tokens.
        gradients: of each pass, that of the loss with respect to the log-probabilities, [B, T].
        rejected: of each pass, valid tokens whose policy loss counts nothing, [B, T] bool.
    """

    rollout: Rollout
    shaped: Tensor
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    rejected: list[Tensor] = field(default_factory=list)


def replay(
    recordings: Sequence[Recording], configurations: Sequence[Configuration], *, restored: bool = True
) -> list[Replayed]:
    """Computes a rollout again, bitwise as it was if recorded on a CPU.

    Args:
        recordings: of all ranks.
        configurations: one for each rank, of objects of its own.
        restored: whether the corrections get the state back that they had; False for those of another configuration.
    """
    threads = recordings[0].header["threads"]
    jobs = [
        partial(_replayed, recording, own, restored=restored)
        for recording, own in zip(recordings, configurations, strict=True)
    ]
    return Lockstep(len(jobs)).run(jobs, threads=threads)


class _Rejections(RLCallback):
    """Keeps which tokens the masks and weights of others leave nothing of."""

    name = "rejections"

    def __init__(self, contributions: Corrections) -> None:
        self.contributions = contributions
        self.found: dict[int, Tensor] = {}  # by sample

    @override
    def observe_update(self, view: LossView) -> None:
        factor = self.contributions.policy_factor(view).factor
        gone = torch.zeros_like(view.valid_tokens) if factor is None else (factor == 0) & view.valid_tokens
        self.found.update(zip(view.sample_ids.tolist(), gone, strict=True))


def _replayed(recording: Recording, configuration: Configuration, *, restored: bool) -> Replayed:
    restore = partial(_restore, configuration) if restored else lambda _states: None
    restore(recording.header["states"])
    contributions = Provided(configuration.callbacks)
    signalled, shaped = _signal(recording, configuration, contributions)
    found = Replayed(signalled, shaped)
    plan = plan_of_rows(
        signalled, _trained_plan(recording, signalled), packed=rebuilt(recording.header["options"])["packing"]
    )
    for number, step in enumerate(recording.header["steps"]):
        if number % recording.minibatches == 0:
            found.gradients.append(torch.zeros_like(shaped))
            found.rejected.append(torch.zeros_like(signalled.valid_tokens))
        restore(step["states"] or {})
        found.parts.append(_step(recording, number, plan, found, configuration) if step["states"] is not None else {})
    return found


def _restore(configuration: Configuration, states: Mapping[str, Any]) -> None:
    for callback in configuration.callbacks:
        if callback.name in states:
            callback.load_state_dict(rebuilt(states[callback.name]))


def _signal(recording: Recording, configuration: Configuration, contributions: Corrections) -> tuple[Rollout, Tensor]:
    """The masks, then the signal, as the stages make them."""
    rollout = recording.rollout
    drawn = rollout.replace(
        trained=rollout.real & (rollout.finish != Finish.ABORT), rewarded=recording.tensors["drawn/scored"],
        valid_tokens=rollout.action_mask, advantages=None, returns=None,
    )  # fmt: skip
    drawn = drawn.replace(rewarded=drawn.rewarded & contributions.reward_mask(drawn))
    witness = Spy(configuration.estimator)
    masked, _ = exclude_rows(drawn, contributions)
    found, _ = estimate_signal(masked, witness, contributions, distributed.global_sum)
    return found, cast(RewardSignal, witness.seen).shaped


def _trained_plan(recording: Recording, rollout: Rollout) -> list[list[list[int]]]:
    """The recorded plan without rows that this configuration excludes."""
    trained = rollout.trained.tolist()
    return [[[row for row in rows if trained[row]] for rows in step] for step in recording.header["plan"]]


def _step(
    recording: Recording, number: int, plan: Plan, found: Replayed, configuration: Configuration
) -> dict[str, Tensor]:
    microbatches = plan.step(number)
    logprobs, entropy = (cast(Tensor, recording.of_step(number, what)) for what in ("logprobs", "entropy"))
    table, values = logprobs.clone().requires_grad_(), recording.of_step(number, "values")
    index_of = {id(microbatch.layout): microbatch.index for microbatch in microbatches}

    def policy(layout: Layout) -> Outputs:
        index, (rows, width) = index_of[id(layout)], layout.shape
        if not len(index):
            nothing = table.sum() * 0 + table.new_zeros(rows, width)
            return Outputs(nothing, nothing.detach(), None if values is None else nothing.detach())
        own = None if values is None else values[index, :width]
        return Outputs(table[index, :width], entropy[index, :width], own)

    rejections = _Rejections(Provided(configuration.callbacks))
    objective = configuration.objective(Provided([*configuration.callbacks, rejections]))
    scale = recording.header["steps"][number]["scale"]
    step = accumulated(
        found.rollout, microbatches, cast(PolicyModel, policy), objective, global_sum=distributed.global_sum,
        global_concat=distributed.global_concat, around=lambda _last: nullcontext(),
        backward=lambda loss: (loss * scale).backward() if loss.requires_grad else None,
    )  # fmt: skip
    if table.grad is not None:
        found.gradients[-1].add_(table.grad)
    for row, sample in enumerate(found.rollout.sample_ids.tolist()):
        if sample in rejections.found:
            found.rejected[-1][row, : len(rejections.found[sample])] = rejections.found[sample]
    return step.parts
