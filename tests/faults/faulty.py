"""What is wrong in the faults of :mod:`faults`: callbacks, estimators, losses, engines and patched functions."""

import copy
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from kit.engine_requests import with_sampling
from torch import Tensor
from typing_extensions import override

import lightning_rl.module
import lightning_rl.rollouts.collect
from lightning_rl import (
    Advantages,
    Completion,
    Estimator,
    LossTerm,
    LossView,
    Request,
    RewardSignal,
    RLCallback,
    Rollout,
    Stat,
    TransformersEngine,
)
from lightning_rl.callbacks import OPSM, ReferenceKL
from lightning_rl.corrections import Corrections
from lightning_rl.policy import PolicyModel
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.update import StepWeights

# wrong callbacks


class InPlaceKL(ReferenceKL):
    """Shapes the reward in the tensor that is logged as the raw KL."""

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        rollout.required("ref_logprobs").data.mul_(0.9)
        return super().token_reward(rollout)


class TokenwiseOPSM(OPSM):
    """Rejects tokens where the rule rejects sequences."""

    name = "tokenwise_opsm"

    @property
    @override
    def contributes(self) -> frozenset[str]:
        return frozenset({"token_mask"})

    @override
    def token_mask(self, view: LossView) -> Tensor:
        drift = torch.where(view.valid_tokens, self._drift(view), 0.0).sum(-1) / view.valid_tokens.sum(-1).clamp(min=1)
        return ~((view.required("advantages") < 0) & (drift[:, None] > self.delta))


class DetachedKL(ReferenceKL):
    """A loss term that is logged and trains nothing."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), per_token=super().loss_term(view).per_token.detach())


class Twice(RLCallback):
    """A weight with the current policy in it, on a loss that has its ratio already."""

    name = "twice"
    reads_at_loss = ("rollout_logprobs",)

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return (view.logprobs.detach() - view.required("rollout_logprobs")).clamp(-2, 2).exp()


class Exploding(RLCallback):
    """Weights that leave one token."""

    name = "exploding"

    @override
    def token_weight(self, view: LossView) -> Tensor:
        first = torch.arange(view.width, device=view.logprobs.device) == 0
        return torch.where(first & (view.sample_ids[:, None] % 64 == 0), 1e6, 1.0).to(view.logprobs.dtype)


class PostRejection(OPSM):
    """Measures what is left after its own rejection."""

    name = "post_rejection"

    @override
    def sequence_mask(self, view: LossView) -> Tensor:
        return torch.sin(1.0 + 2.0 * view.sample_ids) > 0

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        kept = view.valid_tokens & self.sequence_mask(view)[:, None]
        return {"post_rejection/drift": Stat.of(view.logprobs, kept)}


class Unmasked(RLCallback):
    """Takes its mean over padding too."""

    name = "unmasked"

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"unmasked/entropy": Stat.of(view.entropy)}


class LateEdit(RLCallback):
    """Keeps the finished rollout and edits it between optimizer steps, past the version counters."""

    name = "late_edit"

    @override
    def observe(self, rollout: Rollout) -> None:
        self.kept = rollout

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.kept.required("advantages").data.mul_(0.5)


# wrong estimators, losses, engines


def over_everyone(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Centres over rows that are not rewarded as well."""
    return torch.where(rewarded, scores - torch.stack([scores[groups == group].mean() for group in groups]), 0.0)


def over_the_batch(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Centres over the batch where it should be the group."""
    return torch.where(rewarded, scores - scores[rewarded].mean(), 0.0)


def by_position(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Groups by four neighbours instead of by prompt."""
    whole = scores[: len(scores) // 4 * 4].reshape(-1, 4)
    centred = (whole - whole.mean(-1, keepdim=True)).flatten()
    return torch.where(rewarded, torch.nn.functional.pad(centred, (0, len(scores) - len(centred))), 0.0)


class SpreadTooFar(Estimator):
    """Writes advantages to tokens that are not valid."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages((signal.scores - 0.5)[:, None].expand_as(signal.shaped).clone())


def without_gradient(view: LossView) -> Tensor:
    """A loss that trains nothing, because its ratio is detached."""
    return (
        view.logprobs * 0
        + (-(view.logprobs - view.required("old_logprobs")).exp() * view.required("advantages")).detach()
    )


class Copying(TransformersEngine):
    """Decodes with a copy of the policy into which ``taken`` parameters are written; the others stay as they began."""

    def __init__(self, taken: Callable[[str], bool]) -> None:
        super().__init__()
        self.taken = taken

    @override
    def start(self, model: Any, tokenizer: Any) -> None:
        super().start(copy.deepcopy(model), tokenizer)

    @override
    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super()._take(((name, weight) for name, weight in weights if self.taken(name)), version)


class Altering(TransformersEngine):
    """Passes requests and completions through functions."""

    def __init__(self, *, request: Callable[[Request], Request] = lambda one: one,
                 completion: Callable[[Completion], Completion] = lambda one: one) -> None:  # fmt: skip
        super().__init__()
        self.request, self.completion = request, completion

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        return [self.completion(one) for one in super()._draw([self.request(r) for r in requests], logprobs=logprobs)]


def without_eos(completion: Completion) -> Completion:
    """Drops the sampled end of a response."""
    if len(completion.token_ids) < 2 or completion.token_ids[-1] != 1:
        return completion
    logprobs = None if completion.logprobs is None else completion.logprobs[:-1]
    return dataclasses.replace(completion, token_ids=completion.token_ids[:-1], logprobs=logprobs)


# patches


def after(target: Any, name: str, change: Callable[..., Any]) -> Any:
    """Replaces a function by one that changes its result: ``change(result, *arguments)``."""
    original = getattr(target, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return change(original(*arguments, **keywords), *arguments)

    return patch.object(target, name, wrapped)


def changed_rows(change: Callable[[Rollout], Rollout]) -> Any:
    """Changes the rows that drawing makes."""
    return after(Sampler, "_rollout", lambda rollout, *_: change(rollout))


def rolled_ids(rollout: Rollout) -> Rollout:
    """Gives every row the ids of the row before."""
    return rollout.replace(response_ids=rollout.response_ids.roll(1, 0))


def finish_by_width(rollout: Rollout) -> Rollout:
    """Takes the longest rows for cut off."""
    longest = rollout.response_lengths == rollout.response_lengths.max()
    return rollout.replace(finish=longest.to(torch.uint8))


def in_bfloat16(logprobs: Tensor, *_: Any) -> Tensor:
    """Rounds log-probabilities."""
    return logprobs.bfloat16().to(logprobs.dtype)


def excluding_nobody(rollout: Rollout, contributions: Corrections) -> Any:
    """The stage that leaves rows out, without the corrections."""
    trained = rollout.trained & rollout.real
    valid = rollout.action_mask & trained[:, None]
    return rollout.replace(trained=trained, valid_tokens=valid, rewarded=rollout.rewarded & trained), {}


def training_padding(rollout: Rollout, contributions: Corrections) -> Any:
    """The same stage with every position of a response valid, sampled or not."""
    found, stats = EXCLUDING(rollout, contributions)
    return found.replace(valid_tokens=found.trained[:, None].expand_as(found.valid_tokens).clone()), stats


EXCLUDING = lightning_rl.rollouts.collect.excluding
FORWARD = PolicyModel.forward


def callers(depth: int) -> list[str]:
    """Modules on the stack."""
    frames = itertools.islice(traceback.walk_stack(None), depth)
    return [frame.f_globals["__name__"] for frame, _ in frames]


def old_forgets_temperature(self: PolicyModel, layout: Any) -> Any:
    """Forgets the temperature in the pass before the update."""
    if "lightning_rl.rollouts.logprobs" in callers(12):
        with patch.object(self, "temperature", 1.0):
            return FORWARD(self, layout)
    return FORWARD(self, layout)


def all_forget_temperature(self: PolicyModel, layout: Any) -> Any:
    """Forgets the temperature everywhere."""
    with patch.object(self, "temperature", 1.0):
        return FORWARD(self, layout)


def per_microbatch(self: StepWeights, reduction: Any, microbatch: Any) -> Tensor:
    """Denominators of the microbatch in the place of those of the step."""
    here = torch.zeros_like(self.rollout.trained)
    here[microbatch.index] = True
    rows, width = microbatch.layout.shape
    weights = reduction(self.rollout.valid_tokens & here[:, None], self.rollout.trained & here, self.rollout.groups,
                        lambda own: own) / len(self.microbatches)  # fmt: skip
    return weights[microbatch.index, :width] if len(microbatch.index) else weights.new_zeros(rows, width)


def renormalised(result: Tensor, per_token: Tensor, factor: Tensor, valid: Tensor) -> Tensor:
    """Divides by what is kept, as if rejected tokens had never been there."""
    return result * valid.sum() / (valid & (factor != 0)).sum().clamp(min=1)


def score_at_the_last_position(scores: Tensor, token_rewards: Tensor | None, valid: Tensor) -> Tensor:
    """Loses the score wherever the last position is masked."""
    shaped = torch.zeros_like(valid, dtype=scores.dtype) if token_rewards is None else token_rewards * valid
    shaped[:, -1] = shaped[:, -1] + scores
    return shaped * valid


def shaped_kl(stats: dict[str, Stat], view: LossView) -> dict[str, Stat]:
    """Logs the penalty where the raw KL belongs."""
    if view.ref_logprobs is None:
        return stats
    return {**stats, "kl/ref": Stat.of(-0.05 * (view.logprobs - view.ref_logprobs) + 0.3, view.valid_tokens)}


def unmasked_kl(stats: dict[str, Stat], view: LossView) -> dict[str, Stat]:
    """Takes the mean over padding too."""
    if view.ref_logprobs is None:
        return stats
    return {**stats, "kl/ref": Stat.of(view.logprobs - view.ref_logprobs)}


def without_rollout_logprobs(padding: Rollout, *_: Any) -> Rollout:
    """Drops an optional field from padding."""
    return padding.replace(rollout_logprobs=None)


def other_rows(result: Any, *_: Any) -> Any:
    """Advantages of the row before."""
    rollout, stats = result
    return rollout.replace(advantages=rollout.advantages.roll(1, 0)), stats


def one_late(rollout: Rollout, *_: Any) -> Rollout:
    """Log-probabilities of the token before."""
    return rollout.replace(old_logprobs=rollout.required("old_logprobs").roll(1, 1))


def noisy(rollout: Rollout, *_: Any) -> Rollout:
    """Log-probabilities that are slightly off."""
    return rollout.replace(old_logprobs=rollout.required("old_logprobs") + 1e-3)


def only_in_rollouts(request: Request) -> Request:
    """Forgets the temperature of samples that train; the module of the faults allows them eight tokens."""
    return with_sampling(request, temperature=1.0) if request.sampling.max_new_tokens == 8 else request
