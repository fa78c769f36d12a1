"""Faulty parts of a user: callbacks, estimators, losses, rewards, optimizers and engines."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from kit.engine_requests import with_sampling
from torch import Tensor
from typing_extensions import override

from lightning_rl import Estimator, FinishReason, LossTerm, LossView, RLCallback, Rollout, Stat, TransformersEngine
from lightning_rl.advantages import Advantages, RewardSignal
from lightning_rl.callbacks import OPSM, OverlongPenalty, ReferenceKL
from lightning_rl.generation import Completion, Request
from lightning_rl.utils.mutation_guard import Versions


class InPlaceKL(ReferenceKL):
    """Shapes the reward in the tensor that is logged as the raw KL."""

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        rollout.require("ref_logprobs").data.mul_(0.9)
        return super().token_reward(rollout)


class TokenwiseOPSM(OPSM):
    """Rejects tokens instead of sequences."""

    name = "tokenwise_opsm"

    @property
    @override
    def contributes(self) -> frozenset[str]:
        return frozenset({"token_mask"})

    @override
    def token_mask(self, view: LossView) -> Tensor:
        return ~((view.require("advantages") < 0) & (self._drift(view)[:, None] > self.delta))


class DetachedKL(ReferenceKL):
    """A logged loss term without a gradient."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), per_token=super().loss_term(view).per_token.detach())


def twice(view: LossView) -> Tensor:
    return (view.logprobs.detach() - view.require("rollout_logprobs")).clamp(-2, 2).exp()


def exploding(view: LossView) -> Tensor:
    first = torch.arange(view.width, device=view.logprobs.device) == 0
    return torch.where(first & (view.sample_ids[:, None] % 64 == 0), 1e6, 1.0).to(view.logprobs.dtype)


class PostRejection(OPSM):
    """Measures the tokens left after its rejection."""

    name = "post_rejection"

    @override
    def sequence_mask(self, view: LossView) -> Tensor:
        return torch.sin(1.0 + 2.0 * view.sample_ids) > 0

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        kept = view.valid_tokens & self.sequence_mask(view)[:, None]
        return {"post_rejection/drift": Stat.of(view.logprobs, kept)}


class Unmasked(RLCallback):
    """A mean over padding too."""

    name = "unmasked"

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"unmasked/entropy": Stat.of(view.entropy)}


def log_outside(view: LossView) -> LossTerm:
    return LossTerm(per_token=view.logprobs * view.valid_tokens.float().log(), coef=0.1)


class Swapping(RLCallback):
    """Replaces the current rollout."""

    name = "swapping"

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        current = pl_module.run.progress.current
        if current is not None and batch.step:
            changed = current.rollout.replace(advantages=-current.rollout.require("advantages"))
            swapped = dataclasses.replace(current, rollout=changed, versions=Versions(changed.tensors()))
            pl_module.run.progress.current = swapped


class MovingReference(RLCallback):
    """Lets the reference follow the policy."""

    name = "moving_reference"

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        pl_module.models.reference.model.load_state_dict(pl_module.policy.model.state_dict())


class Repelling(ReferenceKL):
    """A penalty of the wrong sign."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), per_token=-super().loss_term(view).per_token)


class Rewarding(ReferenceKL):
    """A reward of the wrong sign."""

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        return -super().token_reward(rollout)


class DeafPenalty(OverlongPenalty):
    """Ignores its coefficient."""

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return self._penalty(rollout)


class Random(RLCallback):
    """Random weights."""

    name = "random"

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return 0.5 + torch.rand_like(view.logprobs.detach())


def over_everyone(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    return torch.where(rewarded, scores - torch.stack([scores[groups == group].mean() for group in groups]), 0.0)


def over_the_batch(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    return torch.where(rewarded, scores - scores[rewarded].mean(), 0.0)


def mean_minus_score(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    same = (groups[:, None] == groups[None]) & rewarded[None]
    mean = torch.where(same, scores[None], 0.0).sum(-1) / same.sum(-1).clamp(min=1)
    return torch.where(rewarded, mean - scores, 0.0)


def by_position(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    whole = scores[: len(scores) // 4 * 4].reshape(-1, 4)
    centred = (whole - whole.mean(-1, keepdim=True)).flatten()
    return torch.where(rewarded, torch.nn.functional.pad(centred, (0, len(scores) - len(centred))), 0.0)


class SpreadTooFar(Estimator):
    """Writes advantages to tokens that are not valid."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages((signal.scores - 0.5)[:, None].expand_as(signal.shaped).clone())


class OverPadding(Estimator):
    """Subtracts a mean over padding too."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        spread = signal.spread_out(signal.scores)
        return Advantages(torch.where(signal.valid_tokens, spread - spread.mean(), 0.0))


class OverTheLongest(Estimator):
    """Divides the centred score by the length of the longest response of the rank."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        same = (signal.groups[:, None] == signal.groups) & signal.rewarded
        means = (same * signal.scores).sum(-1) / same.sum(-1).clamp(min=1)
        centred = torch.where(signal.rewarded, signal.scores - means, 0.0)
        return Advantages(signal.spread_out(centred / signal.valid_tokens.sum(-1).max().clamp(min=1)))


class FirstTokenAlone(Estimator):
    """Uses only the first token."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        first = signal.valid_tokens & (signal.valid_tokens.cumsum(-1) == 1)
        return Advantages(torch.where(first, (signal.scores - 0.5)[:, None], 0.0))


def without_gradient(view: LossView) -> Tensor:
    return (
        view.logprobs * 0
        + (-(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")).detach()
    )


def wrong_way(view: LossView) -> Tensor:
    return (view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")


def by_row(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(row % 2) for row in range(len(completions))]


def without_some(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups[0]["params"][::2], lr=0.05)


class Doubled(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that steps twice."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.8**step)

    @override
    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch:
            super().step()


class Copying(TransformersEngine):
    """Samples with a copy of the policy that gets only some parameters."""

    def __init__(self, takes: Callable[[str], bool]) -> None:
        super().__init__()
        self.takes = takes

    @override
    def start(self, model: Any, tokenizer: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        super().start(copy.deepcopy(model), tokenizer, device=device, dtype=dtype)

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_stream(((name, weight) for name, weight in weights if self.takes(name)), version)


class Altering(TransformersEngine):
    """Passes requests and completions through functions."""

    def __init__(
        self,
        *,
        request: Callable[[Request], Request] = lambda request: request,
        completion: Callable[[Completion], Completion] = lambda completion: completion,
    ) -> None:
        super().__init__()
        self.request, self.completion = request, completion

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        completions = super().generate_batch([self.request(request) for request in requests], logprobs=logprobs)
        return [self.completion(completion) for completion in completions]


def without_eos(completion: Completion) -> Completion:
    if len(completion.token_ids) < 2 or completion.token_ids[-1] != 1:
        return completion
    logprobs = None if completion.logprobs is None else completion.logprobs[:-1]
    return dataclasses.replace(completion, token_ids=completion.token_ids[:-1], logprobs=logprobs)


def at_temperature_one(request: Request) -> Request:
    return with_sampling(request, temperature=1.0)


def a_version_late(completion: Completion) -> Completion:
    return dataclasses.replace(completion, version=completion.version + 1)


def mark_as_truncated(completion: Completion) -> Completion:
    return dataclasses.replace(completion, finish=FinishReason.LENGTH)


def only_in_rollouts(request: Request) -> Request:
    return at_temperature_one(request) if request.sampling.max_new_tokens == 8 else request


def another_prefix(request: Request) -> Request:
    if request.sample_id % 5 or request.sampling.max_new_tokens != 8:
        return request
    return dataclasses.replace(request, prefix_ids=(9, *request.prefix_ids[1:]))
