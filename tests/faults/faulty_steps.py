"""What is wrong in the faults of :mod:`fault_steps`: accumulation, optimizers, schedulers, and more wrong parts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from typing_extensions import override

import lightning_rl.module
import lightning_rl.policy.packing
from faults.faulty import FORWARD
from lightning_rl import (
    Advantages,
    ClippedSurrogate,
    Estimator,
    LossTerm,
    LossView,
    Request,
    RewardSignal,
    RLCallback,
    Rollout,
    Stat,
)
from lightning_rl.callbacks import OverlongPenalty, ReferenceKL
from lightning_rl.policy import PolicyModel


def accumulating(change: Callable[..., Callable[[Tensor], None]]) -> Any:
    """Puts another backward into the accumulation of a step: ``change(backward, microbatches, policy)``."""
    original = lightning_rl.module.accumulated

    def wrapped(
        rollout: Rollout, microbatches: Any, policy: Any, objective: Any, *, backward: Any, **known: Any
    ) -> Any:
        other = change(backward, microbatches, policy)
        return original(rollout, microbatches, policy, objective, backward=other, **known)

    return patch.object(lightning_rl.module, "accumulated", wrapped)


def mean_over_microbatches(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    """Divides a loss that is normalised already by the number of microbatches."""
    return lambda loss: backward(loss / len(microbatches))


def last_microbatch_alone(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    """Clears the gradient before every backward."""

    def backward_alone(loss: Tensor) -> None:
        policy.zero_grad()
        backward(loss)

    return backward_alone


def clipping_each_microbatch(backward: Any, microbatches: Any, policy: Any) -> Callable[[Tensor], None]:
    """Clips what has been accumulated so far after every backward."""

    def backward_clipped(loss: Tensor) -> None:
        backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.02)

    return backward_clipped


def without_some(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer that got half of the parameters."""
    return torch.optim.AdamW(groups[0]["params"][::2], lr=0.05)


class Doubled(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that steps twice."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda _step: 1.0)

    @override
    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch:
            super().step()


def unclipped(norm: Tensor, parallel: Any, model: Any, limit: float) -> Tensor:
    """Undoes the clipping."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= max(float(norm) / limit, 1.0)
    return norm


def ever_on_policy(view: LossView, *_: Any) -> LossView:
    """Takes the current log-probabilities for those before the update."""
    return view.replace(old_logprobs=view.logprobs.detach())


def without_entropy_bonus(found: Any, *_: Any) -> Any:
    """Leaves the entropy bonus of 0.1 out of what is differentiated."""
    coefs = {"loss/entropy": 0.1}
    left = sum(coefs[name] * part for name, part in found.parts.items() if name in coefs)
    return found._replace(total=found.total - left)


# more wrong callbacks, losses and estimators


class Swapping(RLCallback):
    """Puts another rollout in the place of the one that is held."""

    name = "swapping"

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        held = pl_module.run.current
        if held is not None and batch.step:
            changed = held.rollout.replace(advantages=-held.rollout.required("advantages"))
            pl_module.run.current = dataclasses.replace(held, rollout=changed, written=changed.versions())


class MovingReference(RLCallback):
    """Lets the reference follow the policy."""

    name = "moving_reference"

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        pl_module.run.reference.model.load_state_dict(pl_module.policy.model.state_dict())


class Repelling(ReferenceKL):
    """A penalty of the wrong sign."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), per_token=-super().loss_term(view).per_token)


class Rewarding(ReferenceKL):
    """The same as a reward."""

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        return -super().token_reward(rollout)


class DeafPenalty(OverlongPenalty):
    """Ignores its coefficient."""

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return self._penalty(rollout)


class Random(RLCallback):
    """Weights that are drawn."""

    name = "random"

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return 0.5 + torch.rand_like(view.logprobs.detach())


class OverPadding(Estimator):
    """Subtracts a mean over padding as well."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        spread = signal.spread_out(signal.scores)
        return Advantages(torch.where(signal.valid_tokens, spread - spread.mean(), 0.0))


class FirstTokenAlone(Estimator):
    """Forgets every token but the first."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        first = signal.valid_tokens & (signal.valid_tokens.cumsum(-1) == 1)
        return Advantages(torch.where(first, (signal.scores - 0.5)[:, None], 0.0))


def wrong_way(view: LossView) -> Tensor:
    """Unlearns what is good."""
    return (view.logprobs - view.required("old_logprobs")).exp() * view.required("advantages")


def by_row(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Scores the place in the list."""
    return [float(row % 2) for row in range(len(completions))]


def without_last_token(rollout: Rollout) -> Rollout:
    """Takes the last token of every response out of its mask."""
    place = torch.arange(rollout.width)
    mask = rollout.action_mask & (place < rollout.response_lengths[:, None] - 1)
    return rollout.replace(action_mask=mask, valid_tokens=mask, policy_version=torch.where(mask, 0, -1))


def without_first_group(result: Any, *_: Any) -> Any:
    """Loses a group that was drawn and scored."""
    rollout, stats = result
    return rollout.select(rollout.groups != rollout.groups[0]), stats


def twice_the_temperature(self: PolicyModel, layout: Any) -> Any:
    """Divides the logits by the temperature twice."""
    with patch.object(self, "temperature", self.temperature**2):
        return FORWARD(self, layout)


def divided_values(self: PolicyModel, states: Tensor, layout: Any) -> Tensor | None:
    """Divides values as if they were logits."""
    values = VALUES(self, states, layout)
    return None if values is None else values / self.temperature


VALUES = PolicyModel._values  # noqa: SLF001


def another_prefix(request: Request) -> Request:
    """Continues what a cache holds of another prompt, for some samples."""
    if request.sample_id % 5 or request.sampling.max_new_tokens != 8:
        return request
    return dataclasses.replace(request, prefix_ids=(9, *request.prefix_ids[1:]))


def deaf_to_dual_clip(self: ClippedSurrogate, view: LossView) -> Tensor:
    """PPO's loss without the third bound."""
    return SURROGATE(dataclasses.replace(self, dual_clip=None), view)


SURROGATE = ClippedSurrogate.__call__


def one_sequence(lengths: tuple[int, ...]) -> Any:
    """Takes packed sequences for one, where there are more than a check at setup looks at."""
    return RUNS(lengths) if len(lengths) <= 3 else ([(sum(lengths), 1)], [sum(lengths)])


RUNS = lightning_rl.policy.packing._runs  # noqa: SLF001


def logging(name: str, stat: Callable[[Any], Stat]) -> Callable[..., dict[str, Stat]]:
    """Logs something else under a name."""
    return lambda stats, seen, *_: {**stats, name: stat(seen)} if name in stats else stats
