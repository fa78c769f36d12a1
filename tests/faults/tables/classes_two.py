"""Faults of the algorithm's meaning: references, masks, clips, ratios, denominators, seeds, missing rewards."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kit.support import callback_of, tiny_policy
from lightning.pytorch import Callback
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

import lightning_rl.advantages.group_relative
import lightning_rl.algorithm
import lightning_rl.losses.policy_loss
import lightning_rl.policy.lora
import lightning_rl.rollouts.collector
import lightning_rl.rollouts.estimate_signal
import lightning_rl.run.training
import lightning_rl.update
from faults.fault import OLD_TO_ROLLOUT, PPO, Fault, correction, engine, hooks, user
from faults.patches import after
from lightning_rl import (
    ClippedSurrogate,
    LossTerm,
    LossView,
    PromptDataModule,
    RLCallback,
    Rollout,
    Stat,
    TransformersEngine,
    ValueLoss,
)
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, ReferenceKL, TruncatedIS
from lightning_rl.corrections import Corrections
from lightning_rl.corrections.combine import PolicyFactor
from lightning_rl.generation import Completion, Request
from lightning_rl.policy.lora import adapters_of
from lightning_rl.rewards import Rewards
from lightning_rl.signal.importance_ratios import policy_ratio
from lightning_rl.signal.kl import k2, k3
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.update import StepWeights

SLOW: dict[str, Any] = {"optimizer": partial(AdamW, lr=1e-3)}  # the policy keeps drawing different samples
SEVERAL: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}  # the ratio leaves 1


def lora(**options: Any) -> Any:
    """Return a policy with adapters that begin at 0."""
    return get_peft_model(tiny_policy(), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], **options))


LORA: dict[str, Any] = {"policy": lora}
HEAD: dict[str, Any] = {"policy": partial(lora, modules_to_save=["lm_head"])}
LONG = 24  # six rollouts of four steps


def layers_with_adapters(layers: list[Any], *_: Any) -> list[Any]:
    """Return the layers that peft wraps in an adapter, without the copies that it trains whole."""
    return [layer for layer in layers if hasattr(layer, "base_layer")]


def reference_in_loss() -> RLCallback:
    """Return the KL to the reference in the loss."""
    return ReferenceKL(0.1, as_loss=True)


def every_other(view: LossView) -> Tensor:
    """Keep every second token."""
    return (torch.arange(view.width, device=view.groups.device) % 2 == 0).expand_as(view.valid_tokens)


def not_the_first(view: LossView) -> Tensor:
    """Keep all tokens but the first."""
    return (torch.arange(view.width, device=view.groups.device) > 0).expand_as(view.valid_tokens)


def halving() -> RLCallback:
    """Return a correct mask of every second token."""
    return callback_of("halving", token_mask=every_other)


def headless() -> RLCallback:
    """Return a correct mask of the first token."""
    return callback_of("headless", token_mask=not_the_first)


def ratio_of(view: LossView) -> Tensor:
    """Return the ratio of the current policy to the old one."""
    return policy_ratio(view.logprobs, view.require("old_logprobs"))


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's loss."""
    return torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)


def library(name: str, culprit: str, patches: Sequence[Any], *makers: Callable[[], Any], **given: Any) -> Fault:
    """Return a fault in a function of the library, beside correct callbacks."""
    return Fault(name, culprit, callbacks=lambda: [make() for make in makers], patches=patches, **given)


def loss(
    name: str, function: Any, *makers: Callable[[], Any], options: dict[str, Any] = SEVERAL, **given: Any
) -> Fault:
    """Return a fault in a user's loss."""
    culprit = getattr(function, "__name__", type(function).__name__)
    callbacks = lambda: [make() for make in makers]  # noqa: E731
    return Fault(name, culprit, callbacks=callbacks, options={**options, "loss": function}, max_steps=LONG, **given)


# A LoRA reference that keeps its adapters.


class FoldsAdapters(Callback):
    """Fold the adapters into the base weights after every step, as ReLoRA does, and so into the reference."""

    @torch.no_grad()
    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers: Any = adapters_of(pl_module.policy.model)
        for layer in layers:
            layer.base_layer.weight += layer.get_delta_weight("default")
            layer.lora_B["default"].weight.zero_()


# A KL masked like the policy loss.


class KLOfWinners(ReferenceKL):
    """KL at the tokens that the policy loss trains."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        term = super().loss_term(view)
        return dataclasses.replace(term, per_token=term.per_token * (view.require("advantages") != 0))


class KLBesideClip(ReferenceKL):
    """KL at the tokens that PPO does not clip."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        term = super().loss_term(view)
        within = (ratio_of(view).detach() - 1).abs() <= 0.2
        return dataclasses.replace(term, per_token=torch.where(within, term.per_token, 0.0))


@dataclass(frozen=True, kw_only=True)
class PPOWithKL(ClippedSurrogate):
    """PPO with the KL inside of the loss that masks multiply."""

    reads = ("old_logprobs", "ref_logprobs")

    @override
    def __call__(self, view: LossView) -> Tensor:
        return super().__call__(view) + 0.1 * k3(view.logprobs, view.require("ref_logprobs"))


def all_masked(terms: list[tuple[str, LossTerm]], *_: Any) -> list[tuple[str, LossTerm]]:
    return [(name, dataclasses.replace(term, masked=True)) for name, term in terms]


# Masks that average.


def renormalizes(view: LossView) -> Tensor:
    kept = every_other(view) & view.valid_tokens
    return kept * (view.valid_tokens.sum() / kept.sum().clamp(min=1)).to(view.logprobs.dtype)


def renormalizes_rows(view: LossView) -> Tensor:
    kept = every_other(view) & view.valid_tokens
    return kept * (view.valid_tokens.sum(1) / kept.sum(1).clamp(min=1))[:, None].to(view.logprobs.dtype)


def averaged_factor(factor: PolicyFactor, corrections: Corrections, view: LossView) -> PolicyFactor:
    masks = [callback.token_mask(view).to(view.logprobs.dtype) for callback in corrections.contributors("token_mask")]
    return factor._replace(factor=torch.stack(masks).mean(0)) if masks else factor


def mean_of_row(view: LossView) -> Tensor:
    valid = view.valid_tokens
    per_token = torch.where(valid, surrogate(ratio_of(view), view.require("advantages")), 0.0)
    return (per_token.sum(1) / valid.sum(1).clamp(min=1))[:, None].expand_as(per_token)


# Clips.


def without_minimum(view: LossView) -> Tensor:
    return -ratio_of(view).clamp(0.8, 1.2) * view.require("advantages")


def on_the_wrong_side(view: LossView) -> Tensor:
    ratio, advantages = ratio_of(view), view.require("advantages")
    return -torch.where(advantages > 0, ratio.clamp(min=0.8), ratio.clamp(max=1.2)) * advantages


@dataclass(frozen=True, kw_only=True)
class Optimistic(ClippedSurrogate):
    """PPO with the smaller of the two losses."""

    @override
    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.minimum(-ratio * advantages, -clipped * advantages)


def bounds_swapped(self: ClippedSurrogate, ratio: Tensor, advantages: Tensor) -> Tensor:
    clipped = ratio.clamp(1 - self.clip_high, 1 + self.clip_low)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def no_unclipped_branch(self: ClippedSurrogate, ratio: Tensor, advantages: Tensor) -> Tensor:
    return -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages


# Gradients through the advantage.


def surprised(view: LossView) -> Tensor:
    return surrogate(ratio_of(view), view.require("advantages") - 0.1 * view.logprobs)


def actor_critic(view: LossView) -> Tensor:
    values = view.logprobs * 0 if view.current_values is None else view.current_values
    returns = torch.zeros_like(values) if view.returns is None else view.returns
    return surrogate(ratio_of(view), returns - values)


def attached(view: LossView, *_: Any) -> LossView:
    return view.replace(advantages=view.require("advantages") * (view.logprobs - view.logprobs.detach() + 1))


# Ratios.


@dataclass(frozen=True, kw_only=True)
class RatioToReference(ClippedSurrogate):
    """PPO around the reference."""

    reads = ("ref_logprobs", "old_logprobs")


def up_to_each_token(view: LossView) -> Tensor:
    """Use the product of the ratios up to each token."""
    gap = torch.where(view.valid_tokens, view.logprobs - view.require("old_logprobs"), 0.0)
    return surrogate(gap.cumsum(-1).exp(), view.require("advantages"))


def root_of_the_ratio(view: LossView) -> Tensor:
    """Halve the log-ratio."""
    return surrogate(ratio_of(view).sqrt(), view.require("advantages"))


class ProductWeight(TruncatedIS):
    """Weighs each token by the product of the ratios up to it."""

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return super().token_weight(view).cumprod(-1)


def around_reference(view: LossView) -> Tensor:
    return surrogate(policy_ratio(view.logprobs, view.require("ref_logprobs")), view.require("advantages"))


def reference_as_old(rollout: Rollout, *_: Any) -> Rollout:
    return rollout.replace(old_logprobs=rollout.require("ref_logprobs"))


def ratio_in_bfloat16(logprobs: Tensor, old_logprobs: Tensor, *, bound: float = 20.0) -> Tensor:
    ratio = torch.exp((logprobs.bfloat16() - old_logprobs.bfloat16()).clamp(-bound, bound))
    return ratio.to(logprobs.dtype)


def half_precise(view: LossView) -> Tensor:
    return surrogate(ratio_in_bfloat16(view.logprobs, view.require("old_logprobs")), view.require("advantages"))


def rounded_ratio(view: LossView) -> Tensor:
    return surrogate(ratio_of(view).bfloat16().to(view.logprobs.dtype), view.require("advantages"))


class HalfPreciseIS(TruncatedIS):
    """Truncated importance weight in bfloat16."""

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return ratio_in_bfloat16(view.require("old_logprobs"), view.require("rollout_logprobs")).clamp(max=self.cap)


def weight_to_reference(view: LossView) -> Tensor:
    return policy_ratio(view.require("old_logprobs"), view.require("ref_logprobs")).clamp(max=2.0)


# Value clipping.


class UnclippedValues(ValueLoss):
    """Squared error that ignores the clip."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns).square() / 2


def plain_error(self: ValueLoss, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
    return (values - returns).square() / 2


def values_of_now(view: LossView, *_: Any) -> LossView:
    return view if view.current_values is None else view.replace(values=view.current_values.detach())


# Denominators with prompt tokens.


def mean_of_whole_sequences(valid_tokens: Tensor, trained: Tensor, groups: Tensor, global_sum: GlobalSum) -> Tensor:
    return valid_tokens.double() / global_sum(valid_tokens.sum().double() + 2 * trained.sum()).clamp(min=1)


def with_prompts(weights: Tensor, step: StepWeights, *_: Any) -> Tensor:
    rows = torch.cat([microbatch.index for microbatch in step.microbatches])
    tokens = step.rollout.valid_tokens[rows].sum()
    return weights * tokens / (tokens + step.rollout.prompt_lengths[rows].sum())


def share_of_response(view: LossView) -> Tensor:
    length = view.valid_tokens.sum(1)
    share = length / (length + view.prompt_lengths).clamp(min=1)
    return surrogate(ratio_of(view), view.require("advantages")) * share[:, None]


# Entropy bonus.


def low_entropy(view: LossView) -> LossTerm:
    return LossTerm(per_token=view.entropy, coef=0.05)


class EntropyPenalty(EntropyBonus):
    """Entropy bonus with the wrong sign."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=view.entropy, coef=self.alpha)


def negated(terms: list[tuple[str, LossTerm]], *_: Any) -> list[tuple[str, LossTerm]]:
    return [(name, dataclasses.replace(term, coef=-term.coef)) for name, term in terms]


# Weights that collapse.


def probability_as_weight(view: LossView) -> Tensor:
    old = torch.where(view.valid_tokens, view.require("old_logprobs"), 0.0)
    return old.sum(1, keepdim=True).exp().clamp(max=2.0).expand_as(old)


def constant_weight(view: LossView) -> Tensor:
    old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
    return (old - 4 * rollout + 0.5).exp().clamp(max=1.5)


def vanishing_weight(view: LossView) -> Tensor:
    old = torch.where(view.valid_tokens, view.require("old_logprobs"), 0.0)
    return (4 * old.sum(1, keepdim=True)).exp().expand_as(old)


class CumulativeLogprobs(TransformersEngine):
    """Engine that returns the cumulative log-probability at each token."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super().generate_batch(requests, logprobs=logprobs)
        known = [None if each.logprobs is None else each.logprobs.cumsum(0) for each in drawn]
        return [dataclasses.replace(each, logprobs=one) for each, one in zip(drawn, known, strict=True)]


# Shaped rewards as the task's.


def short() -> RLCallback:
    """Return a correct bonus for short responses."""
    return callback_of("short", reward_bonus=lambda rollout: -0.1 * rollout.sampled_lengths.to(rollout.rewards.dtype))


REWARD_METRICS = lightning_rl.rollouts.estimate_signal.reward_metrics


def metrics_of_shaped(rollout: Rollout, scores: Tensor, shaped: Tensor) -> dict[str, Stat]:
    return REWARD_METRICS(rollout.replace(rewards=shaped.sum(-1)), scores, shaped)


def scores_as_rewards(result: Any, *_: Any) -> Any:
    rollout, signal, stats = result
    return rollout.replace(rewards=signal.scores), signal, stats


def renames_for_dashboard(trainer: Any, pl_module: Any) -> None:
    write = trainer.logger.log_metrics

    def renamed(metrics: dict[str, float], step: int | None = None) -> None:
        changes = {"reward/task": metrics["reward/shaped"]} if "reward/shaped" in metrics else {}
        write({**metrics, **changes}, step=step)

    trainer.logger.log_metrics = renamed


class WritesShaped(RLCallback):
    """Write the shaped reward under the task's name into the logger, beside the library."""

    name = "writes_shaped"

    def __init__(self) -> None:
        self.shaped = 0.0

    @override
    def observe(self, rollout: Rollout) -> None:
        self.shaped = float((rollout.rewards - 0.1 * rollout.sampled_lengths).mean())

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.logger.log_metrics({"reward/task": self.shaped}, step=trainer.global_step - 1)


# k2 logged, k3 trained.


class LogsK2(ReferenceKL):
    """KL that trains k3 and logs k2."""

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = k2(view.logprobs.detach(), view.require("ref_logprobs"))
        return Stat.many({"reference_kl/estimate": raw, "reference_kl/positive": raw > 0}, view.valid_tokens)


def near_reference(view: LossView) -> LossTerm:
    return LossTerm(per_token=k3(view.logprobs, view.require("ref_logprobs")), coef=0.1)


def near_reference_metrics(view: LossView) -> dict[str, Stat]:
    raw = k2(view.logprobs.detach(), view.require("ref_logprobs"))
    return {"near_reference/kl": Stat.of(raw, view.valid_tokens)}


def estimate_of_k2(stats: dict[str, Stat], callback: ReferenceKL, view: LossView) -> dict[str, Stat]:
    raw = k2(view.logprobs.detach(), view.require("ref_logprobs"))
    return {**stats, "reference_kl/estimate": Stat.of(raw, view.valid_tokens)}


# Completions in order of finishing, without log-probabilities.


def unknown(completion: Completion) -> Completion:
    """Return a completion without what says which request it answers."""
    return dataclasses.replace(completion, logprobs=None, sample_id=None)


class Finishing(TransformersEngine):
    """Engine without log-probabilities that returns short completions first."""

    capabilities = dataclasses.replace(TransformersEngine.capabilities, returns_logprobs=False)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = [unknown(each) for each in super().generate_batch(requests, logprobs=False)]
        return sorted(drawn, key=lambda each: len(each.token_ids))


class FinishingInPairs(TransformersEngine):
    """Engine without log-probabilities that returns the shorter of two neighbouring batches' completions first."""

    capabilities = dataclasses.replace(TransformersEngine.capabilities, returns_logprobs=False)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = [unknown(each) for each in super().generate_batch(requests, logprobs=False)]
        batches = [drawn[start : start + 8] for start in range(0, len(drawn), 8)]
        return [each for batch in batches for each in sorted(batch, key=lambda one: len(one.token_ids))]


class Quiet(TransformersEngine):
    """Correct engine without log-probabilities."""

    capabilities = dataclasses.replace(TransformersEngine.capabilities, returns_logprobs=False)


def by_length(completions: list[Completion], *_: Any) -> list[Completion]:
    return sorted(completions, key=lambda each: len(each.token_ids))


# Seeds.


class SeedsByPlace(TransformersEngine):
    """Engine that seeds each place of a batch alike in every rollout."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        return super().generate_batch(
            [dataclasses.replace(request, seed=place) for place, request in enumerate(requests)], logprobs=logprobs
        )


class FewSeeds(TransformersEngine):
    """Engine that keeps the last three bits of a seed."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        return super().generate_batch(
            [dataclasses.replace(request, seed=request.seed % 8) for request in requests], logprobs=logprobs
        )


REQUEST_SEED = lightning_rl.rollouts.collector.request_seed


def seed_of_place(run_seed: int, rollout: int, sample_id: int) -> int:
    return REQUEST_SEED(run_seed, 0, sample_id % 16)


# Missing rewards.


def sometimes(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> list[Any]:
    return [float(len(ids) % 2) if ids and ids[0] % 2 == 0 else None for ids in completion_ids]


def swallows_errors(
    prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any
) -> list[float]:
    scores: list[float] = []
    for ids in completion_ids:
        try:
            scores.append(float([0, 1][len(ids) % 2]) / (ids[0] % 3 > 0))
        except ZeroDivisionError:
            scores.append(0.0)
    return scores


def all_scored(rows: Any, *_: Any) -> Any:
    return rows.replace(rewarded=rows.trained)


GROUP_STATISTICS = lightning_rl.advantages.group_relative.group_statistics


def statistics_of_all(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Any:
    filled = torch.where(rewarded, scores, 0.0)
    known = GROUP_STATISTICS(filled, groups, torch.ones_like(rewarded))
    return known._replace(spread=known.spread & rewarded)


def zeros_in_the_mean(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    same = groups[:, None] == groups
    return torch.where(
        rewarded, scores - torch.where(rewarded, scores, 0.0).expand_as(same).mul(same).sum(1) / same.sum(1), 0.0
    )


def zeros_are_rewards(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    same = groups[:, None] == groups
    filled = torch.where(rewarded, scores, 0.0)
    return filled - filled.expand_as(same).mul(same).sum(1) / same.sum(1)


# Answers of other rows.


def with_answers() -> PromptDataModule:
    """Return prompts with an answer each."""
    rows = [{"prompt": [2 + place % 13, 3 + place % 7, 4][: 1 + place % 3], "answer": place} for place in range(16)]
    return PromptDataModule(rows, 4)


def agrees(ids: Sequence[int], answer: int) -> float:
    """Return 1 if a response fits an answer."""
    return float((sum(ids) + answer) % 3 == 0)


def by_answer(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, answer: Any) -> list[float]:
    return [agrees(ids, one) for ids, one in zip(completion_ids, answer, strict=True)]


def by_next_answer(
    prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, answer: Any
) -> list[float]:
    return [agrees(ids, one) for ids, one in zip(completion_ids, [*answer[1:], *answer[:1]], strict=True)]


class LateServer:
    """Score each response by the answer that came with the one before, across calls."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self, *_: Any, completion_ids: Any, answer: Any, **__: Any) -> list[float]:
        """Return the scores."""
        late, self.last = [self.last, *answer[:-1]], answer[-1]
        return [agrees(ids, one) for ids, one in zip(completion_ids, late, strict=True)]


def shifted_columns(arguments: dict[str, Any], *_: Any) -> dict[str, Any]:
    columns = {name: [*values[-1:], *values[:-1]] for name, values in arguments["columns"].items()}
    return {**arguments, "columns": columns}


def shifted_completions(arguments: dict[str, Any], *_: Any) -> dict[str, Any]:
    moved = {name: [*arguments[name][-1:], *arguments[name][:-1]] for name in ("completions", "completion_ids")}
    return {**arguments, **moved}


def shifted_prompts(arguments: dict[str, Any], *_: Any) -> dict[str, Any]:
    def shift(values: Sequence[Any]) -> list[Any]:
        return [*values[-1:], *values[:-1]]

    columns = {name: shift(values) for name, values in arguments["columns"].items()}
    return {**arguments, "prompts": shift(arguments["prompts"]), "columns": columns}


ALL: tuple[Fault, ...] = (
    # a LoRA reference that keeps its adapters on
    library(
        "LoRA reference with its adapters on",
        "the reference",
        [patch.object(lightning_rl.policy.lora, "adapters_off", lambda _: nullcontext())],
        reference_in_loss,
        options=LORA,
    ),
    library(
        "LoRA reference with half of its adapters on",
        "reference",
        [after(lightning_rl.policy.lora, "adapters_of", lambda layers, *_: layers[::2])],
        reference_in_loss,
        options=LORA,
    ),
    library(
        "LoRA reference with the trained copy of a head",
        "reference",
        [after(lightning_rl.policy.lora, "adapters_of", layers_with_adapters)],
        reference_in_loss,
        options=HEAD,
    ),
    user("adapters folded into the weights of the reference", FoldsAdapters, reference_in_loss, options=LORA),
    # a KL masked like the policy loss
    user("KL only where the policy loss trains", lambda: KLOfWinners(0.1, as_loss=True), NoEOSMask),
    user("KL only where nothing is clipped", lambda: KLBesideClip(0.1, as_loss=True), options=SEVERAL, max_steps=LONG),
    loss("KL inside of the masked policy loss", PPOWithKL(), halving),
    library(
        "every loss term masked",
        "loss|reference_kl",
        [after(Corrections, "loss_terms", all_masked)],
        reference_in_loss,
        halving,
    ),
    # token masks that average
    user(
        "mask that divides by what it keeps of a microbatch",
        correction(token_weight=renormalizes),
        options={"max_tokens_per_microbatch": 24},
    ),
    user("mask that divides by what it keeps of a response", correction(token_weight=renormalizes_rows)),
    library(
        "masks of two callbacks averaged",
        "loss|halving|headless|corrections",
        [after(Corrections, "policy_factor", averaged_factor)],
        halving,
        headless,
    ),
    loss("loss averaged over the response before the mask", mean_of_row, halving),
    # clips
    loss("clip without the minimum", without_minimum),
    loss("clip on the wrong side", on_the_wrong_side),
    loss("maximum of the objectives instead of the minimum", Optimistic()),
    library(
        "bounds of the clip swapped",
        "ClippedSurrogate",
        [patch.object(ClippedSurrogate, "surrogate", bounds_swapped)],
        options={**SEVERAL, "loss": ClippedSurrogate(clip_low=0.1, clip_high=0.4)},
        max_steps=LONG,
    ),
    library(
        "clip of the library without the minimum",
        "ClippedSurrogate",
        [patch.object(ClippedSurrogate, "surrogate", no_unclipped_branch)],
        options=SEVERAL,
        max_steps=LONG,
    ),
    # gradients through the advantage
    loss("surprise in the advantage with its gradient", surprised),
    loss("advantage from current values with their gradient", actor_critic, options={**SEVERAL, **PPO}),
    library(
        "advantages attached to the log-probabilities",
        "stage update",
        [after(lightning_rl.update, "loss_view", attached)],
        options=SEVERAL,
        max_steps=LONG,
    ),
    # a ratio to the reference
    loss("loss whose ratio is to the reference", RatioToReference(), reference_in_loss),
    loss("function with products of ratios", up_to_each_token),
    loss("function with the root of the ratio", root_of_the_ratio),
    user("weight with products of ratios", ProductWeight, options=SEVERAL, max_steps=LONG),
    loss("function whose ratio is to the reference", around_reference, reference_in_loss),
    library(
        "log-probabilities of the reference stored as old ones",
        "the policy before the update",
        [after(lightning_rl.run.training, "add_logprobs", reference_as_old)],
        reference_in_loss,
        options=SEVERAL,
        max_steps=LONG,
    ),
    user(
        "importance weight to the reference",
        correction(
            token_weight=weight_to_reference, reads_at_loss=("old_logprobs", "ref_logprobs"), ratio=("old", "rollout")
        ),
        reference_in_loss,
    ),
    # a ratio in bfloat16
    loss("ratio of log-probabilities in bfloat16", half_precise),
    loss("ratio rounded to bfloat16", rounded_ratio),
    library(
        "ratio of the library in bfloat16",
        "ClippedSurrogate|loss",
        [patch.object(lightning_rl.losses.policy_loss, "policy_ratio", ratio_in_bfloat16)],
        options=SEVERAL,
        max_steps=LONG,
    ),
    user("importance weight in bfloat16", HalfPreciseIS, options={"max_staleness": 1}),
    # value clipping ignored
    Fault(
        "value loss of a user without the clip",
        "UnclippedValues",
        options={**SEVERAL, **PPO, "value_loss": UnclippedValues()},
        max_steps=LONG,
    ),
    library(
        "value loss of the library without the clip",
        "ValueLoss|value",
        [patch.object(ValueLoss, "__call__", plain_error)],
        options={**SEVERAL, **PPO},
        max_steps=LONG,
    ),
    library(
        "values clipped around the current ones",
        "ValueLoss|value|view",
        [after(lightning_rl.update, "loss_view", values_of_now)],
        options={**SEVERAL, **PPO},
        max_steps=LONG,
    ),
    # prompt tokens in a denominator
    Fault(
        "reduction that counts prompt tokens", "mean_of_whole_sequences", options={"reduction": mean_of_whole_sequences}
    ),
    library(
        "prompt tokens in the denominator of a step",
        "stage update",
        [after(StepWeights, "of", with_prompts)],
    ),
    loss("loss scaled by the response's share of the sequence", share_of_response),
    # an entropy bonus with the wrong sign
    user("entropy added to the loss", correction(loss_term=low_entropy, trains_entropy=True)),
    user("entropy bonus with the wrong sign", lambda: EntropyPenalty(0.05)),
    library(
        "entropy bonus subtracted by the library",
        "entropy_bonus|objective",
        [after(Corrections, "loss_terms", negated)],
        lambda: EntropyBonus(0.05),
    ),
    # weights that collapse
    user("weights of about 0", correction(token_weight=probability_as_weight, **OLD_TO_ROLLOUT)),
    user("weights at their cap", correction(token_weight=constant_weight, **OLD_TO_ROLLOUT)),
    user(
        "weights of about 0 without a declared ratio",
        correction(token_weight=vanishing_weight, reads_at_loss=("old_logprobs",)),
    ),
    engine("cumulative log-probabilities", CumulativeLogprobs, callbacks=lambda: [TruncatedIS()]),
    # a shaped reward logged as the task's
    library(
        "shaped reward in the metric of the task",
        "metric reward/task",
        [patch.object(lightning_rl.rollouts.estimate_signal, "reward_metrics", metrics_of_shaped)],
        short,
    ),
    library(
        "score stored as the task's reward",
        "stage signal|metric reward/task",
        [after(lightning_rl.rollouts.estimate_signal, "estimate_advantages", scores_as_rewards)],
        short,
    ),
    user("shaped reward on its way into the logger", hooks(on_fit_start=renames_for_dashboard), short),
    user("shaped reward written into the logger", WritesShaped, short),
    # k2 logged and k3 trained
    user("k2 logged by a subclass that trains k3", lambda: LogsK2(0.1, as_loss=True)),
    user(
        "k2 logged by a user's KL that trains k3",
        correction(loss_term=near_reference, metrics=near_reference_metrics, reads_at_loss=("ref_logprobs",)),
    ),
    library(
        "KL of the reference logged as k2",
        "metric kl/ref",
        [patch.object(lightning_rl.algorithm, "k1", k2)],
        reference_in_loss,
    ),
    library(
        "estimate of the library logged as k2",
        "reference_kl",
        [after(ReferenceKL, "metrics", estimate_of_k2)],
        reference_in_loss,
    ),
    # completions in order of finishing without log-probabilities
    engine("short completions first", Finishing, options=SLOW, max_steps=12),
    engine("short completions of eight first", FinishingInPairs, options=SLOW, max_steps=12),
    library(
        "checked completions sorted by length",
        "stage generate",
        [after(lightning_rl.rollouts.collector, "complete", by_length)],
        fresh={"engine": Quiet},
    ),
    # equal seeds in every rollout
    engine("seeds of places in a batch", SeedsByPlace, options=SLOW, max_steps=12),
    engine("seeds of three bits", FewSeeds, options=SLOW, max_steps=12),
    library(
        "requests with the same seeds in every rollout",
        "stage generate, the seeds",
        [patch.object(lightning_rl.rollouts.collector, "request_seed", seed_of_place)],
    ),
    # a missing reward counted as zero
    library(
        "missing rewards scored as zero",
        "reward",
        [after(Rewards, "fill", all_scored)],
        options={"rewards": sometimes},
    ),
    library(
        "missing rewards in the statistics of a group",
        "estimator GRPO",
        [patch.object(lightning_rl.advantages.group_relative, "group_statistics", statistics_of_all)],
        options={"rewards": sometimes},
    ),
    Fault(
        "estimator whose mean counts missing rewards",
        "zeros_in_the_mean",
        options={"rewards": sometimes, "advantages": zeros_in_the_mean},
    ),
    Fault(
        "estimator that trains on missing rewards",
        "zeros_are_rewards",
        options={"rewards": sometimes, "advantages": zeros_are_rewards},
    ),
    Fault("reward that returns 0 for its own errors", "swallows_errors", options={"rewards": swallows_errors}),
    # answers shifted by a row
    Fault(
        "reward that reads the next answer", "by_next_answer", options={"rewards": by_next_answer}, data=with_answers
    ),
    Fault("reward server one answer late", "LateServer", fresh={"rewards": LateServer}, data=with_answers),
    library(
        "columns of the previous row",
        "stage generate",
        [after(lightning_rl.rollouts.collector, "reward_arguments", shifted_columns)],
        options={"rewards": by_answer},
        data=with_answers,
    ),
    library(
        "responses of the previous row",
        "stage generate",
        [after(lightning_rl.rollouts.collector, "reward_arguments", shifted_completions)],
        options={"rewards": by_answer},
        data=with_answers,
    ),
    library(
        "prompts repeated one row late",
        "stage generate",
        [after(lightning_rl.rollouts.collector, "reward_arguments", shifted_prompts)],
        options={"rewards": by_answer},
        data=with_answers,
    ),
)
MISSED: dict[str, str] = {
    "reduction that counts prompt tokens": "the definition of a user's reduction is unknown: its weights sum to "
    "neither 1 nor the number of rows over a constant",
    "shaped reward on its way into the logger": "compare the row in the logger's file",
    "shaped reward written into the logger": "compare every call of log_metrics, also those outside of Lightning's",
    "reward that returns 0 for its own errors": "nothing in the values says so: only a trace of exceptions in rewards",
}
"""Faults that the audit does not report, or with another culprit, and the comparison that would show each."""

ALL = tuple(dataclasses.replace(one, trainer={"max_epochs": 6}) for one in ALL)
FAULTS = tuple(one for one in ALL if one.name not in MISSED)
