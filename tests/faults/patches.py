"""Faulty replacements of stages of the library."""

import dataclasses
import itertools
import traceback
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

import lightning_rl.policy.attention
import lightning_rl.run.training
from lightning_rl import ClippedSurrogate, LossView, Rollout, Stat
from lightning_rl.corrections import Corrections
from lightning_rl.policy import PolicyModel
from lightning_rl.rollouts import collector
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.run.run import Run
from lightning_rl.signal.masked import local_sum
from lightning_rl.update import StepWeights


def after(target: Any, name: str, change: Callable[..., Any]) -> Any:
    """Patch a function by one that changes its result: ``change(result, *arguments)``."""
    original = getattr(target, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return change(original(*arguments, **keywords), *arguments)

    return patch.object(target, name, wrapped)


def change_rows(change: Callable[[Rollout], Rollout]) -> Any:
    """Change the rows of sampling."""
    return after(collector, "lay_out", lambda rollout, *_: change(rollout))


def rolled_ids(rollout: Rollout) -> Rollout:
    return rollout.replace(response_ids=rollout.response_ids.roll(1, 0))


def finish_by_width(rollout: Rollout) -> Rollout:
    longest = rollout.response_lengths == rollout.response_lengths.max()
    return rollout.replace(finish=longest.to(torch.uint8))


def in_bfloat16(logprobs: Tensor, *_: Any) -> Tensor:
    return logprobs.bfloat16().to(logprobs.dtype)


def exclude_nobody(rollout: Rollout, corrections: Corrections) -> Any:
    trained = rollout.trained & rollout.real
    valid = rollout.action_mask & trained[:, None]
    return rollout.replace(trained=trained, valid_tokens=valid, rewarded=rollout.rewarded & trained), {}


FORWARD = PolicyModel.forward


def callers(depth: int) -> list[str]:
    """Return the modules on the stack."""
    frames = itertools.islice(traceback.walk_stack(None), depth)
    return [frame.f_globals["__name__"] for frame, _ in frames]


def old_forgets_temperature(self: PolicyModel, layout: Any) -> Any:
    if "lightning_rl.rollouts.logprob_passes" in callers(12):
        with patch.object(self, "temperature", 1.0):
            return FORWARD(self, layout)
    return FORWARD(self, layout)


def all_forget_temperature(self: PolicyModel, layout: Any) -> Any:
    with patch.object(self, "temperature", 1.0):
        return FORWARD(self, layout)


def per_microbatch(self: StepWeights, reduction: Any, microbatch: Any) -> Tensor:
    here = torch.zeros_like(self.rollout.trained)
    here[microbatch.index] = True
    rows, width = microbatch.layout.shape
    masks = (self.rollout.valid_tokens & here[:, None], self.rollout.trained & here, self.rollout.groups)
    weights = reduction(*masks, local_sum) / len(self.microbatches)
    return weights[microbatch.index, :width] if len(microbatch.index) else weights.new_zeros(rows, width)


def renormalized(result: Tensor, per_token: Tensor, factor: Tensor, valid: Tensor) -> Tensor:
    return result * valid.sum() / (valid & (factor != 0)).sum().clamp(min=1)


def score_at_the_last_position(
    scores: Tensor, token_rewards: Tensor | None, valid: Tensor, _turn_rewards: Tensor | None = None
) -> Tensor:
    shaped = torch.zeros_like(valid, dtype=scores.dtype) if token_rewards is None else token_rewards * valid
    shaped[:, -1] = shaped[:, -1] + scores
    return shaped * valid


def shaped_kl(stats: dict[str, Stat], view: LossView) -> dict[str, Stat]:
    if view.ref_logprobs is None:
        return stats
    return {**stats, "kl/ref": Stat.of(-0.05 * (view.logprobs - view.ref_logprobs) + 0.3, view.valid_tokens)}


def other_rows(result: Any, *_: Any) -> Any:
    rollout, *rest = result
    return rollout.replace(advantages=rollout.advantages.roll(1, 0)), *rest


def one_late(rollout: Rollout, *_: Any) -> Rollout:
    return rollout.replace(old_logprobs=rollout.require("old_logprobs").roll(1, 1))


def noisy(rollout: Rollout, *_: Any) -> Rollout:
    return rollout.replace(old_logprobs=rollout.require("old_logprobs") + 1e-3)


def accumulating(change: Callable[..., Callable[[Tensor], None]]) -> Any:
    """Patch the backward pass in the accumulation of a step: ``change(backward, microbatches, policy)``."""
    original = lightning_rl.run.training.accumulate

    def accumulate(run: Run, step_index: Any, backward: Any, **options: Any) -> Any:
        current = cast(CurrentRollout, run.progress.current)
        changed = change(backward, current.plan.step(step_index.step), run.policy)
        return original(run, step_index, changed, **options)

    return patch.object(lightning_rl.run.training, "accumulate", accumulate)


def mean_over_microbatches(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    return lambda loss: backward(loss / len(microbatches))


def last_microbatch_alone(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    def backward_alone(loss: Tensor) -> None:
        policy.zero_grad()
        backward(loss)

    return backward_alone


def clipping_each_microbatch(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    def backward_clipped(loss: Tensor) -> None:
        backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.02)

    return backward_clipped


def unclipped(norm: Tensor, parallel: Any, model: Any, limit: float) -> Tensor:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= max(float(norm) / limit, 1.0)
    return norm


def ever_on_policy(view: LossView, *_: Any) -> LossView:
    return view.replace(old_logprobs=view.logprobs.detach())


def without_entropy_bonus(loss: Any, algorithm: Any, view: LossView, weights_of: Any) -> Any:
    entropy = torch.where(view.valid_tokens, view.entropy, 0.0)
    return loss._replace(total=loss.total + 0.1 * (entropy * weights_of(algorithm.reduction)).sum())


def without_last_token(rollout: Rollout) -> Rollout:
    place = torch.arange(rollout.width)
    mask = rollout.action_mask & (place < rollout.response_lengths[:, None] - 1)
    return rollout.replace(
        action_mask=mask, valid_tokens=mask, policy_version=torch.where(mask, rollout.policy_version, -1)
    )


def without_first_group(result: Any, *_: Any) -> Any:
    rollout = result.rollout
    return result._replace(rollout=rollout.select(rollout.groups != rollout.groups[0]))


def twice_the_temperature(self: PolicyModel, layout: Any) -> Any:
    with patch.object(self, "temperature", self.temperature**2):
        return FORWARD(self, layout)


def divided_values(self: PolicyModel, states: Tensor, layout: Any) -> Tensor | None:
    values = VALUES(self, states, layout)
    return None if values is None else values / self.temperature


VALUES = PolicyModel._values  # noqa: SLF001


def deaf_to_dual_clip(self: ClippedSurrogate, view: LossView) -> Tensor:
    return SURROGATE(dataclasses.replace(self, dual_clip=None), view)


SURROGATE = ClippedSurrogate.__call__


def one_sequence(lengths: tuple[tuple[int, int], ...]) -> Any:
    if len(lengths) <= 4:
        return RUNS(lengths)
    sizes = sum(queries for queries, _ in lengths), sum(keys for _, keys in lengths)
    return lightning_rl.policy.attention._Runs([1], [sizes[0]], [sizes[1]])  # noqa: SLF001


RUNS = lightning_rl.policy.attention._runs  # noqa: SLF001


def logging(name: str, stat: Callable[[Any], Stat]) -> Callable[..., dict[str, Stat]]:
    """Log something else under a name."""
    return lambda stats, seen, *_: {**stats, name: stat(seen)} if name in stats else stats
