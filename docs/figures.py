"""Draws what each algorithm does on the quickstart: ``python docs/figures.py`` writes ``docs/figures/*.svg``.

    python docs/figures.py              # all of them, in two minutes of CPU
    python docs/figures.py GSPO IcePop  # some

The quickstart's policy trains for a few rollouts with fixed seeds: four optimizer steps for each, one rollout generated
ahead, so that policies differ. The last rollout and its steps are then what every algorithm is shown: a loss gives the
gradient at each of its tokens, an estimator the advantage, a mask its decision. Algorithms that need a critic, answers
that were truncated, or a mixture of experts see a separate run. What the default makes of the same is drawn in grey. A
correction without an entry in :data:`FIGURES` is drawn from its example in ``tests/properties/corrections.py``.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import AdamW
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import sorting_task as task
from properties.corrections import EXAMPLES

from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, Rollout, SamplingParams, losses
from lightning_rl import advantages as estimators
from lightning_rl import callbacks as corrections
from lightning_rl.callbacks.curriculum import group_signal
from lightning_rl.corrections import CONTRIBUTIONS, Corrections, LossView, StepTrace
from lightning_rl.rollouts.estimate_signal import estimate_signal
from lightning_rl.signal.kl import KL_ESTIMATORS
from lightning_rl.signal.masked import local_sum, row_mean
from lightning_rl.signal.reductions import REDUCTIONS, Reduction, SequenceSumNorm
from lightning_rl.signal.selection import local_values

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
ROLLOUTS, ANSWERS, GROUP, MINIBATCHES = 12, 256, 8, 4
DOTS = 400
GOOD, BAD, PLAIN, GREY = "#2f8f5b", "#d1495b", "#6d6bd6", "#8a8a8a"
STYLE = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "svg.hashsalt": "lightning-rl",
    "font.size": 9,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), GREY),
}
SIGNS, MARKS = ("advantage > 0", "advantage < 0"), ("right", "wrong")
RATIO = {"": "", "mean": ", mean of the response", "sum": ", sum over the response"}


@dataclass
class Run:
    """Record of a fit: its last rollout, and the optimizer steps on it."""

    rollout: Rollout | None = None
    steps: list[StepTrace] = field(default_factory=list)
    policy: Any = None

    @property
    def last(self) -> Rollout:
        """The rollout."""
        if self.rollout is None:
            raise ValueError("expected a run that has seen a rollout, got one without")
        return self.rollout

    @property
    def views(self) -> list[list[LossView]]:
        """The microbatches of each step."""
        return [[microbatch.view for microbatch in step.microbatches] for step in self.steps]


class Watch(RLCallback):
    """Keeps the last rollout with its steps."""

    name = "watch"

    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def observe(self, rollout: Rollout) -> None:
        self.run.rollout = rollout
        self.run.steps.clear()

    @override
    def observe_step(self, trace: StepTrace) -> None:
        self.run.steps.append(trace)


class WellRead(estimators.GRPO):
    """GRPO in a run that notes what other estimators read: a greedy answer, the squared probabilities."""

    needs_greedy = True
    reads = estimators.OptimalTokenBaseline().reads


def quickstart_policy() -> Any:
    """The quickstart's policy before it is trained."""
    return task.warm_started_policy(0)


def fit(
    *callbacks: RLCallback,
    policy: Callable[[], Any] = quickstart_policy,
    rewards: Callable[..., list[float]] = task.exactly_sorted,
    max_new_tokens: int = 12,
    group_size: int = GROUP,
    rollouts: int = ROLLOUTS,
    max_staleness: int = 1,
    **options: Any,
) -> Run:
    """Trains the quickstart's policy, and keeps what it saw last."""
    module = RLLightningModule(
        policy=policy,
        tokenizer=task.sorting_tokenizer(),
        rewards=rewards,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        optimizer=partial(AdamW, lr=1e-4, weight_decay=0.0, fused=True),
        minibatches_per_rollout=MINIBATCHES,
        max_staleness=max_staleness,
        group_size=group_size,
        seed=0,
        **options,
    )
    rows = task.sorting_prompts(rollouts * ANSWERS // group_size, seed=0, exclude=task.held_out_prompts())
    run = Run()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Watch(run)],
    )
    trainer.fit(module, PromptDataModule(rows, ANSWERS // group_size, seed=0))
    run.policy = module.required_policy.model
    return run


@cache
def with_critic() -> Run:
    """PPO: one answer to each prompt."""
    return fit(advantages=estimators.GAE(), critic="shared", group_size=1)


@cache
def plain() -> Run:
    """GRPO with the clipped surrogate; penalties without weight have reference and teacher looked up as well."""
    teacher = corrections.TeacherKL(lambda: with_critic().policy, 0.0, as_loss=True)
    return fit(corrections.ReferenceKL(0.0, as_loss=True), teacher, advantages=WellRead())


@cache
def short() -> Run:
    """The same with at most 8 tokens, which cuts the answers to the longest lists off."""
    return fit(max_new_tokens=8)


@cache
def centered() -> Run:
    """The same with the engine's distributions."""
    return fit(corrections.ScoreCentering(None))


@cache
def of_experts(*, replay: bool) -> Run:
    """Two rollouts of an untrained mixture of experts in bfloat16, none ahead, and a reward that it gets some of."""
    callbacks = [corrections.RouterReplay()] if replay else []
    return fit(*callbacks, policy=mixture, rewards=share_sorted, rollouts=2, max_staleness=0)


@cache
def balanced() -> Run:
    """The same with the load of its experts."""
    return fit(corrections.RouterAuxLoss(), policy=mixture, rewards=share_sorted, rollouts=2, max_staleness=0)


def mixture() -> Qwen2MoeForCausalLM:
    """A policy of the quickstart's shape whose routers choose among many experts, so that scores lie close."""
    dense = task.untrained_policy(0).config.to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = Qwen2MoeConfig(
        **{name: dense[name] for name in (*kept, "eos_token_id", "pad_token_id", "bos_token_id")},
        num_experts=32,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        initializer_range=0.25,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Qwen2MoeForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    return model


def share_sorted(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of a reward
    completions: Sequence[str],
    *,
    answer: Sequence[str],
    **columns: object,  # noqa: ARG001 - as above
) -> list[float]:
    """The share of digits that stand where they belong."""
    return [
        sum(a == b for a, b in zip(said.split(), wanted.split(), strict=False)) / len(wanted.split())
        for said, wanted in zip(completions, answer, strict=True)
    ]


class Dots(NamedTuple):
    """A figure: a dot for each token or response, coloured by whether it was good; in grey what the default does."""

    x: Tensor
    y: Tensor
    good: Tensor | None
    across: str
    up: str
    legend: tuple[str, str] = SIGNS
    grey: tuple[str, Tensor] | None = None


def join(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Lists of tensors, joined place by place."""
    return [torch.cat(list(part)) for part in zip(*parts, strict=True)]


def gradients(loss: losses.PolicyLoss, views: Sequence[LossView]) -> list[Tensor]:
    """Minus the gradient of the summed loss of a step with respect to each log-probability, over the advantage."""
    chosen = loss.prepare(views, local_sum, local_values) if loss.prepares else [None] * len(views)
    weights = []
    for view, prepared in zip(views, chosen, strict=True):
        logprobs = view.logprobs.detach().requires_grad_()
        per_token = loss(view.replace(logprobs=logprobs, prepared=prepared))
        (slope,) = torch.autograd.grad(torch.where(view.valid_tokens, per_token, 0.0).sum(), logprobs)
        weights.append(-slope / view.require("advantages"))
    return weights


def log_ratio(view: LossView, over: str, under: str, whole: str) -> Tensor:
    """The log-ratio of two policies at each token, or the mean or sum of its response there."""
    upper, lower = (logprobs_of(view, name) for name in (over, under))
    ratio = torch.where(view.valid_tokens, upper - lower, 0.0)
    if whole:
        ratio = (row_mean(ratio, view.valid_tokens) if whole == "mean" else ratio.sum(-1))[:, None]
    return ratio.expand_as(view.valid_tokens)


def variation(view: LossView, over: str, under: str) -> Tensor:
    """Mean distance of the ratios of a response's tokens from 1."""
    distance = (log_ratio(view, over, under, "").exp() - 1).abs()
    return row_mean(distance, view.valid_tokens)[:, None].expand_as(view.valid_tokens)


def logprobs_of(view: LossView, policy: str) -> Tensor:
    """Its log-probability of each token."""
    return view.logprobs if policy == "current" else view.require(f"{policy}_logprobs")


def taught(view: LossView) -> Tensor:
    """The tokens that have an advantage."""
    return view.valid_tokens & (view.require("advantages") != 0)


def by_loss(loss: losses.PolicyLoss, *, anchor: str = "old", whole: str = "") -> Dots:
    """Draw the factor of a loss on the policy gradient of each token, against its log-ratio."""
    parts = []
    for views in plain().views:
        for view, weight, usual in zip(
            views, gradients(loss, views), gradients(losses.ClippedSurrogate(), views), strict=True
        ):
            kept = taught(view)
            each = log_ratio(view, "current", anchor, whole), weight, view.require("advantages") > 0, usual
            parts.append([value[kept] for value in each])
    x, y, good, usual = join(parts)
    grey = None if type(loss) is losses.ClippedSurrogate else ("ClippedSurrogate", usual)
    across = f"log-ratio of the current to the {anchor} policy{RATIO[whole]}"
    return Dots(x, y, good, across, "weight of the policy gradient", grey=grey)


def by_value_loss() -> Dots:
    """The push on the value of each token, against how far it is below the return."""
    parts = []
    for step in with_critic().steps:
        tokens = sum(int(each.view.valid_tokens.sum()) for each in step.microbatches)
        for each in step.microbatches:
            gap = each.view.require("returns") - each.view.require("current_values")
            push = -each.further["current_values"] * tokens
            parts.append([value[each.view.valid_tokens] for value in (gap, push)])
    x, y = join(parts)
    return Dots(x, y, None, "return minus value", "push on the value")


def group_shares(rollout: Rollout) -> Tensor:
    """For each response, the share of right ones in its group."""
    right = (rollout.rewards > 0).double()
    return torch.stack([right[rollout.groups == group].mean() for group in rollout.groups])


def by_group(estimator: estimators.Estimator) -> Dots:
    """The advantage of each response, against how many of its group are right."""
    rollout = plain().last

    def per_row(each: estimators.Estimator) -> Tensor:
        signal, *_ = estimate_signal(rollout, each, Corrections())
        return row_mean(signal.require("advantages"), rollout.valid_tokens)

    grey = None if type(estimator) is estimators.GRPO else ("GRPO", per_row(estimators.GRPO()))
    right = rollout.rewards > 0
    x = group_shares(rollout) + torch.where(right, -0.004, 0.004)
    return Dots(x, per_row(estimator), right, "share of right answers in the group", "advantage", MARKS, grey)


def by_position(
    estimator: estimators.Estimator,
    run: Callable[[], Run] = plain,
    usual: tuple[str, estimators.Estimator] | None = None,
) -> Dots:
    """The advantage of each token, against its place in the response."""
    rollout = run().last
    valid, right = rollout.valid_tokens, (rollout.rewards > 0)[:, None].expand_as(rollout.valid_tokens)
    place = torch.arange(valid.shape[1]) + 1.0 + torch.where(right, -0.12, 0.12)

    def advantages(each: estimators.Estimator) -> Tensor:
        return estimate_signal(rollout, each, Corrections())[0].require("advantages")[valid]

    grey = None if usual is None else (usual[0], advantages(usual[1]))
    return Dots(place[valid], advantages(estimator), right[valid], "token of the response", "advantage", MARKS, grey)


def by_length(reduction: Reduction) -> Dots:
    """The weight of each token under a reduction, against the length of its response; 1 is the mean over all tokens."""
    rollout = plain().last

    def weights(each: Reduction) -> Tensor:
        of_tokens = each(rollout.valid_tokens, rollout.trained, rollout.groups, local_sum)
        return row_mean(of_tokens * rollout.valid_tokens.sum(), rollout.valid_tokens)

    usual = REDUCTIONS["token_mean"]
    grey = None if reduction is usual else ("token_mean", weights(usual))
    lengths = rollout.valid_tokens.sum(-1).double()
    return Dots(lengths, weights(reduction), None, "tokens of the response", "weight of each of its tokens", grey=grey)


def by_kl(name: str) -> Dots:
    """The estimate of the KL to the reference at each token, against its log-ratio."""
    parts = []
    for view in (view for views in plain().views for view in views):
        estimate = KL_ESTIMATORS[name](view.logprobs, view.require("ref_logprobs"))
        parts.append([value[view.valid_tokens] for value in (log_ratio(view, "current", "ref", ""), estimate)])
    x, y = join(parts)
    return Dots(x, y, None, "log-ratio of the current policy to the reference", "estimate of the KL, nats")


def by_factor(correction: RLCallback, over: str = "old", under: str = "rollout", whole: str = "") -> Dots:
    """Draw the factor of a mask or weight on the policy loss of each token, against its input."""
    parts = []
    for view in (view for views in plain().views for view in views):
        factor, kept = Corrections([correction]).policy_factor(view).factor, taught(view)
        if factor is None:
            raise ValueError(f"expected a factor of {correction.name}, got none")
        seen = variation(view, over, under) if whole == "variation" else log_ratio(view, over, under, whole)
        each = seen, factor, view.require("advantages") > 0
        parts.append([value[kept] for value in each])
    x, y, good = join(parts)
    across = f"log-ratio of the {over} to the {under} policy{RATIO.get(whole)}"
    if whole == "variation":
        across = f"|ratio - 1| of the {over} to the {under} policy, mean of the response"
    return Dots(x, y, good, across, "factor of the policy loss")


def by_replay() -> Dots:
    """The log-ratio of trainer to engine at each token, with the engine's experts and without."""
    (x, y), (other_x, other_y) = (
        (rollout.require("rollout_logprobs")[rollout.valid_tokens],
         (rollout.require("old_logprobs") - rollout.require("rollout_logprobs"))[rollout.valid_tokens])
        for rollout in (of_experts(replay=True).last, of_experts(replay=False).last)
    )  # fmt: skip
    good = torch.arange(len(x) + len(other_x)) < len(x)
    legend = "with the engine's experts", "with the router's own"
    across, up = "log-probability by the engine", "log-ratio of the old to the rollout policy"
    return Dots(torch.cat([x, other_x]), torch.cat([y, other_y]), good, across, up, legend)


def by_balance() -> Dots:
    """Draw the load-balancing loss of each token, against its log-probability."""
    parts = []
    for view in (view for views in balanced().views for view in views):
        values = view.logprobs, view.require("router_loss"), view.require("advantages") > 0
        parts.append([value[view.valid_tokens] for value in values])
    x, y, good = join(parts)
    return Dots(x, y, good, "log-probability under the current policy", "loss of the routers", SIGNS)


def by_row(
    correction: RLCallback, method: str, up: str, *, run: Callable[[], Run] = plain, group: bool = False
) -> Dots:
    """Draw the value of a correction for each response, against its length or the share of right ones in its group."""
    rollout = run().last
    value, right = getattr(correction, method)(rollout).double(), rollout.rewards > 0
    side = torch.where(right, -1.0, 1.0)
    if group:
        return Dots(
            group_shares(rollout) + 0.004 * side, value, right, "share of right answers in the group", up, MARKS
        )
    return Dots(rollout.response_lengths + 0.1 * side, value, right, "tokens of the response", up, MARKS)


def by_term(correction: RLCallback, frozen: str) -> Dots:
    """Draw the gradient of a loss term at each log-probability, against its log-ratio."""
    parts = []
    for view in (view for views in plain().views for view in views):
        logprobs = view.logprobs.detach().requires_grad_()
        term = correction.loss_term(view.replace(logprobs=logprobs))
        (slope,) = torch.autograd.grad(term.per_token.sum(), logprobs)
        other = view.token_extras["teacher_logprobs"] if frozen == "teacher" else view.require(f"{frozen}_logprobs")
        each = view.logprobs - other, -term.coef * slope
        parts.append([value[view.valid_tokens] for value in each])
    x, y = join(parts)
    names = {"ref": "reference", "old": "old policy", "rollout": "rollout policy", "teacher": "teacher"}
    return Dots(x, y, None, f"log-ratio of the current policy to the {names[frozen]}", "push on the log-probability")


def by_entropy(correction: RLCallback) -> Dots:
    """Draw the entropy bonus of each token."""
    parts = []
    for view in (view for views in plain().views for view in views):
        term = correction.loss_term(view)
        parts.append([value[view.valid_tokens] for value in (view.entropy, -term.coef * term.per_token)])
    x, y = join(parts)
    return Dots(x, y, None, "entropy of the policy before the token, nats", "bonus")


def by_centering() -> Dots:
    """Draw the term of score centering at each token, against the log-ratio there."""
    parts = []
    for view in (view for views in centered().views for view in views):
        term = view.require("advantages") * view.require("rollout_kl")
        ratio = view.logprobs - view.require("rollout_logprobs")
        parts.append([value[taught(view)] for value in (ratio, term, view.require("advantages") > 0)])
    x, y, good = join(parts)
    return Dots(x, y, good, "log-ratio of the current policy to the rollout policy", "advantage times KL", SIGNS)


def by_imitation(correction: corrections.PositiveNLL) -> Dots:
    """Draw the gradient of the imitation of right answers at each of their tokens."""
    rollout = plain().last
    push = correction.coef * correction.provide(rollout)[correction.provides[0]].double() * rollout.valid_tokens.sum()
    right = rollout.rewards > 0
    x = group_shares(rollout) + torch.where(right, -0.004, 0.004)
    return Dots(x, push, right, "share of right answers in the group", "push on each log-probability", MARKS)


def by_signal() -> Dots:
    """Draw the signal of each answer's group, by which a curriculum chooses pools."""
    rollout = plain().last
    signals, _, _ = group_signal(rollout)
    right = rollout.rewards > 0
    x = group_shares(rollout) + torch.where(right, -0.004, 0.004)
    return Dots(x, signals, right, "share of right answers in the group", "advantage times wrong share", MARKS)


def with_baseline() -> corrections.RoleBaseline:
    """Return the baseline of a role that has won half of its games; rows without a role have it here."""
    made = corrections.RoleBaseline()
    made.baselines = {"": 0.5}
    return made


GAE_ONE = ("GAE", estimators.GAE())
ADDED = "added to the reward"
OF_ROWS = ("reward_mask", "replace_reward", "reward_bonus", "keep_groups", "exclude")

FIGURES: Mapping[str, Callable[[], Dots]] = {
    "CISPO": partial(by_loss, losses.CISPO()),
    "DPPO": partial(by_loss, losses.DPPO(), anchor="rollout"),
    "DRO": partial(by_loss, losses.DRO(), anchor="rollout"),
    "GMPO": partial(by_loss, losses.GMPO(), whole="mean"),
    "GSPO": partial(by_loss, losses.GSPO(), whole="mean"),
    "M2PO": partial(by_loss, losses.M2PO(), anchor="rollout"),
    "SAPO": partial(by_loss, losses.SAPO()),
    "VESPO": partial(by_loss, losses.VESPO(), anchor="rollout", whole="sum"),
    "ClipCov": partial(by_loss, losses.ClipCov(fraction=0.05, cov_low=0.1)),
    "ClippedSurrogate": partial(by_loss, losses.ClippedSurrogate()),
    "KLCov": partial(by_loss, losses.KLCov(fraction=0.05)),
    "Reinforce": partial(by_loss, losses.Reinforce()),
    "ValueLoss": by_value_loss,
    "GAE": partial(by_position, estimators.GAE(), with_critic),
    "GAEOverTurns": partial(by_position, estimators.GAEOverTurns(), with_critic, GAE_ONE),
    "LengthAdaptive": partial(by_position, estimators.GAE(lam=estimators.LengthAdaptive(0.5)), with_critic, GAE_ONE),
    "RelativePosition": partial(
        by_position, estimators.GAE(lam=estimators.RelativePosition(0.5)), with_critic, GAE_ONE
    ),
    **{
        type(each).__name__: partial(by_group, each)
        for each in (
            estimators.GPG(), estimators.GRPO(), estimators.HierarchicalGRPO(), estimators.OPO(), estimators.RLOO(),
            estimators.DrGRPO(), estimators.MaxRL(), estimators.Normalized(std="batch"), estimators.PassAtK(),
            estimators.RawReward(),
            estimators.ReMax(), estimators.ReinforcePlusPlus(), estimators.ReinforcePlusPlusBaseline(),
        )
    },
    "OptimalTokenBaseline": partial(
        by_position, estimators.OptimalTokenBaseline(), usual=("DrGRPO", estimators.DrGRPO())
    ),
    **{name: partial(by_length, each) for name, each in REDUCTIONS.items()},
    "SequenceSumNorm": partial(by_length, SequenceSumNorm(12)),
    **{getattr(function, "__name__", name): partial(by_kl, name) for name, function in KL_ESTIMATORS.items()},
    "OPSM": partial(by_factor, corrections.OPSM(0.05), "current", "old", "mean"),
    "DivergenceMask": partial(by_factor, corrections.DivergenceMask(0.01)),
    "IcePop": partial(by_factor, corrections.IcePop()),
    "OutlierMask": partial(by_factor, corrections.OutlierMask(0.2, 5.0)),
    "SequenceRatioMask": partial(by_factor, corrections.SequenceRatioMask("product"), whole="sum"),
    "TotalVariationMask": partial(by_factor, corrections.TotalVariationMask(0.05), whole="variation"),
    "OffPolicyIS": partial(by_factor, corrections.OffPolicyIS(0.5, 2.0), "current", "rollout"),
    "TruncatedIS": partial(by_factor, corrections.TruncatedIS()),
    "RouterAuxLoss": by_balance,
    "RouterReplay": by_replay,
    "ScoreCentering": by_centering,
    "NoEOSMask": partial(
        by_row, corrections.NoEOSMask(), "reward_mask", "enters statistics of the reward", run=short
    ),
    "StopProperly": partial(by_row, corrections.StopProperly(reward=-0.5), "replace_reward", "reward", run=short),
    "DynamicSampling": partial(by_row, corrections.DynamicSampling(), "keep_groups", "kept", group=True),
    "Curriculum": by_signal,
    "LinearLengthPenalty": partial(by_row, corrections.LinearLengthPenalty(0.25), "reward_bonus", ADDED),
    "OverlongPenalty": partial(by_row, corrections.OverlongPenalty(10, 4), "reward_bonus", ADDED),
    "RewardNormalization": partial(
        by_row, corrections.RewardNormalization("group", "none"), "replace_reward", "reward", group=True
    ),
    "RoleBaseline": partial(by_row, with_baseline(), "reward_bonus", ADDED),
    "EntropyBonus": partial(by_entropy, corrections.EntropyBonus(0.05)),
    "PositiveNLL": partial(by_imitation, corrections.PositiveNLL(0.1)),
    "ReferenceKL": partial(by_term, corrections.ReferenceKL(0.05, as_loss=True), "ref"),
    "AdaptiveKL": partial(by_term, corrections.AdaptiveKL(0.05, as_loss=True, estimator="k2"), "ref"),
    "RolloutKL": partial(by_term, corrections.RolloutKL(0.05), "rollout"),
    "TeacherKL": partial(by_term, corrections.TeacherKL(None, 0.05, as_loss=True, estimator="k2"), "teacher"),
}  # fmt: skip


def by_example(name: str) -> Dots:
    """Draw the first example of a correction without an entry in :data:`FIGURES`, by its first contribution."""
    example = next((one for one in EXAMPLES if type(one).__name__ == name), None)
    if example is None:
        raise SystemExit(f"expected a class of an example in tests/properties/corrections.py, got {name}")
    if example.contributes & {"sequence_mask", "token_mask", "token_weight"}:
        return by_factor(example)
    if rows := [method for method in CONTRIBUTIONS if method in example.contributes and method in OF_ROWS]:
        return by_row(example, rows[0], rows[0])
    return by_term(example, "old")


def draw(name: str) -> Path:
    """Writes a figure."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.6, 2.8), layout="constrained")
        axes = figure.subplots()
        scatter(axes, FIGURES[name]() if name in FIGURES else by_example(name))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.svg"
    text = re.sub(r"(\d\.\d)\d{2,}", r"\1", written.getvalue())  # a tenth of a point is small enough
    path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    return path


def scatter(axes: Axes, shown: Dots) -> None:
    """The dots of a figure, grey ones below."""
    if shown.grey is not None:
        name, values = shown.grey
        dots(axes, shown.x, values, GREY, name)
    if shown.good is None:
        dots(axes, shown.x, shown.y, PLAIN, None if shown.grey is None else "this")
    else:
        good = shown.good.bool()
        dots(axes, shown.x[good], shown.y[good], GOOD, shown.legend[0])
        dots(axes, shown.x[~good], shown.y[~good], BAD, shown.legend[1])
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, handlelength=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set(xlabel=shown.across, ylabel=shown.up)


def dots(axes: Axes, x: Tensor, y: Tensor, color: str, label: str | None) -> None:
    """Dots as one line with gaps and round ends, which an SVG holds in a tenth of the space of single marks.

    Of dots that would lie on each other one is drawn, and of very many every second, third and so on.
    """
    x, y = x.detach().double(), y.detach().double()
    places = [
        ((values - values.min()) / (values.max() - values.min()).clamp(min=1e-9) * 150).round() for values in (x, y)
    ]
    first = {
        place: number for number, place in reversed(list(enumerate(zip(*(p.tolist() for p in places), strict=True))))
    }
    kept = torch.tensor(sorted(first.values()), dtype=torch.long)[:: len(first) // DOTS + 1]
    gap = torch.full_like(x[kept], torch.nan)
    across, up = (torch.stack([values[kept], values[kept], gap], 1).flatten() for values in (x, y))
    axes.plot(across, up, color=color, linewidth=4, solid_capstyle="round", alpha=0.7, label=label)


def main(names: Sequence[str]) -> None:
    """Draws some of the figures, or all."""
    torch.set_num_threads(1)  # the same sums on every machine
    for name in names or dict.fromkeys((*FIGURES, *corrections.__all__)):
        sys.stdout.write(f"{draw(name).relative_to(ROOT)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
