"""Valid configurations, for which the audit must report nothing.

``python -m tests.faults.clean [--seeds N] [part of a name ...]`` lists alarms, and ends with
``configurations=N alarms=N``. The configurations were written without the checks in view.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.chats import (
    CHAT,
    TOOLS,
    BriefPartner,
    GonePartner,
    Partner,
    PartnersThatBreak,
    chat_prompts,
    last_answer,
)
from kit.support import parity_reward, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from faults.runs import audit_run
from lightning_rl import (
    GAE,
    ClipCov,
    ClippedSurrogate,
    LossView,
    Normalized,
    PromptDataModule,
    RLCallback,
    Rollout,
    Stat,
    presets,
)
from lightning_rl.advantages import GRPO
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DivergenceMask,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    LinearLengthPenalty,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    PositiveNLL,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    SequenceRatioMask,
    StopProperly,
    TeacherKL,
    TotalVariationMask,
    TruncatedIS,
)

STEPS = {"minibatches_per_rollout": 2, "epochs_per_rollout": 1}
MANY_STEPS = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2, "max_tokens_per_microbatch": 24}
PPO = {"advantages": GAE(lam=0.95), "critic": "shared"}
MANY_TURNS = {"max_turns": 6, "max_new_tokens": 8}
RAGGED = {"max_new_tokens": 24, "eos_token_ids": [1, 5, 9]}


@dataclass(frozen=True)
class Configuration:
    """A run without a fault.

    Attributes:
        name: Description.
        options: Options of the module.
        callbacks: Returns the callbacks.
        fresh: Options of the module that are made for each run, by name.
        data: Returns the prompts.
        max_steps: Number of optimizer steps.
        trainer: Options of the Trainer.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Any]] = list
    fresh: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    data: Callable[[], PromptDataModule] = lambda: tiny_prompts(24, 4)
    max_steps: int = 8
    trainer: Mapping[str, Any] = field(default_factory=dict)


# Rewards of any size.


def fraction(scale: float, offset: float = 0.0) -> Callable[..., list[float]]:
    """Return thirds and sevenths, times a scale."""

    def fraction_of(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        return [offset + scale * (sum(ids) % 7) / (3 + len(ids)) for ids in completion_ids]

    return fraction_of


def sparse(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float | None]:
    """Return None for most rows."""
    return [None if len(ids) % 3 == 0 else len(ids) / 8 for ids in completion_ids]


def constant(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """Return equal rewards, so there is no signal."""
    return [0.1] * len(prompts)


# Valid parts of a user.


class RoundedForValidation(Callback):
    """Validates with weights in half precision, and restores them."""

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}
        with torch.no_grad():
            for weight in pl_module.parameters():
                weight.copy_(weight.half())

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for name, weight in pl_module.named_parameters():
                weight.copy_(self.kept[name])


def centred(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Return scores minus the mean of their group."""
    advantages = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (groups == group) & rewarded
        if rows.any():
            advantages[rows] = scores[rows] - scores[rows].mean()
    return advantages


def own_surrogate(view: LossView) -> Tensor:
    """Return the clipped surrogate."""
    ratio, advantages = (view.logprobs - view.require("old_logprobs")).exp(), view.require("advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


class UnsureTokens(RLCallback):
    """Measures uncertain tokens and tokens with a positive advantage, whose number varies."""

    name = "unsure_tokens"

    @override
    def metrics(self, view: LossView) -> Mapping[str, Stat]:
        unsure, good = view.entropy.detach() > 1.0, view.require("advantages") > 0
        return {
            "unsure_tokens/logprob": Stat.of(view.logprobs, view.valid_tokens & unsure),
            "unsure_tokens/good": Stat.of(view.entropy, view.valid_tokens & good),
        }


class Difficulty(RLCallback):
    """Provides the distance of a group mean from the middle, and weighs tokens by it."""

    name = "difficulty"
    compares_rows = True

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        weight = torch.ones(len(rollout), dtype=rollout.rewards.dtype)
        for group in rollout.groups.unique():
            rows = rollout.groups == group
            weight[rows] = 1.5 - (rollout.rewards[rows].mean().clamp(0, 1) - 0.5).abs()
        return {"extras/weight": weight}

    @override
    def token_weight(self, view: LossView) -> Tensor:
        weight = view.extras["weight"].to(view.logprobs.dtype)
        return weight[:, None].expand_as(view.logprobs).detach()


class EndsAlone(RLCallback):
    """Masks tokens after the fourth in the policy loss."""

    name = "ends_alone"

    @override
    def token_mask(self, view: LossView) -> Tensor:
        return view.valid_tokens.cumsum(-1) <= 4


def nothing_to_learn() -> DynamicSampling:
    """Drop every group, in every round."""
    return DynamicSampling(1e6, max_rounds=2)


def policy_later(optimizer: Optimizer) -> LambdaLR:
    """Train the policy after four steps."""
    return LambdaLR(optimizer, [lambda step: float(step >= 4), lambda _step: 1.0])


def from_zero(optimizer: Optimizer) -> LambdaLR:
    """Warm up from a rate of 0."""
    return LambdaLR(optimizer, lambda step: min(step / 5, 1.0))


def lora(**options: Any) -> Any:
    """Return a policy with adapters."""
    shape = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(tiny_policy(**options), shape)


def partly_frozen() -> Any:
    """Return a policy with frozen embeddings."""
    model = tiny_policy()
    model.get_input_embeddings().requires_grad_(requires_grad=False)
    return model


def preset(name: str, **options: Any) -> Configuration:
    """Return a preset at four optimizer steps per rollout if it takes several."""
    recipe = presets.PRESETS[name](**options)
    steps = {} if name == "rloo" else STEPS
    given = {key: value for key, value in recipe.options.items() if key != "sampling"}
    return Configuration(
        f"preset {name}", {"max_new_tokens": 8, **given, **steps}, lambda: presets.PRESETS[name](**options).callbacks
    )


def every_correction(name: str, precision: str) -> Configuration:
    """Return a preset with all its corrections."""
    recipe, per_token = presets.PRESETS[name](), name in ("ppo", "reinforce_plus_plus")

    def corrections() -> list[RLCallback]:
        ratios = [SequenceRatioMask("geometric", 0.5, 2.0), SequenceRatioMask("product", 0.0, 9.0).with_name("product")]
        masks = [*ratios, OutlierMask(), IcePop(), OPSM(against="rollout"), NoEOSMask()]
        terms = [RolloutKL(), EntropyBonus(0.001, target=1.0), OverlongPenalty(8, 4)]
        terms += [AdaptiveKL(0.01), RewardNormalization()] if per_token else [ReferenceKL(0.01, as_loss=True)]
        return [*masks, *terms, OffPolicyIS() if name == "rloo" else TruncatedIS()]

    options = {"temperature": 0.7, **recipe.options, "max_new_tokens": 8, **({} if name == "rloo" else STEPS)}
    options = {key: value for key, value in options.items() if key != "sampling"}
    return Configuration(
        f"{name} with every correction, {precision}", options, corrections, trainer={"precision": precision}
    )


def with_loss(name: str) -> Configuration:
    """Return a loss by name, with several steps."""
    return Configuration(f"loss {name}", {"loss": name, **({} if name == "reinforce" else MANY_STEPS)})


def with_estimator(name: str) -> Configuration:
    """Return an estimator by name, with fractional rewards."""
    critic = {"critic": "shared"} if name == "gae" else {}
    return Configuration(
        f"estimator {name}, fractional reward", {"advantages": name, "rewards": fraction(1.0), **critic, **STEPS}
    )


KL = partial(ReferenceKL, 0.1, as_loss=True)

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("everything by default"),
    *[preset(name) for name in ("ppo", "grpo", "gspo", "cispo", "reinforce_plus_plus", "dppo", "gmpo")],
    *[preset(name) for name in ("m2po", "clip_cov", "kl_cov", "lite_ppo", "luspo", "vespo")],
    *[preset(name, max_new_tokens=8) for name in ("dr_grpo", "dapo", "rloo")],
    *[every_correction(name, "32-true") for name in ("grpo", "ppo", "gspo", "cispo", "rloo", "reinforce_plus_plus")],
    *[every_correction(name, "bf16-mixed") for name in ("grpo", "ppo")],
    *[with_loss(name) for name in ("reinforce", "gspo", "cispo", "dppo", "sapo", "gmpo", "clip_cov", "kl_cov", "m2po")],
    with_loss("dro"),
    *[with_estimator(name) for name in ("grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce")],
    *[with_estimator(name) for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae")],
    *[
        Configuration(f"rewards of {scale:g}", {"rewards": fraction(scale), "advantages": "grpo", **STEPS})
        for scale in (1e-3, 1e3)
    ],
    Configuration("several rewards", {"rewards": {"a": (fraction(0.1), 0.3), "b": parity_reward, "c": (sparse, 0.0)}}),
    Configuration("a reward that often does not apply", {"rewards": sparse}),
    Configuration("a reward that is the same for all", {"rewards": constant}),
    Configuration("weights in float64", {"policy": partial(tiny_policy, dtype=torch.float64), **STEPS}, lambda: [KL()]),
    Configuration(
        "weights in bfloat16",
        {"policy": partial(tiny_policy, dtype=torch.bfloat16), "optimizer": partial(AdamW, lr=0.01), **STEPS},
        lambda: [KL()],
    ),
    Configuration("bf16-mixed", {**STEPS}, lambda: [KL()], trainer={"precision": "bf16-mixed"}),
    Configuration("bf16-true", {"rewards": fraction(1.0)}, trainer={"precision": "bf16-true"}),
    Configuration(
        "bf16-mixed with a critic", {**PPO, **STEPS}, lambda: [ReferenceKL(0.1)], trainer={"precision": "bf16-mixed"}
    ),
    Configuration("without packing", {"packing": False, **MANY_STEPS, **RAGGED}, lambda: [KL()]),
    Configuration("activations computed again", {"activation_checkpointing": True, **STEPS}, lambda: [KL()]),
    Configuration(
        "a row in every microbatch", {"max_tokens_per_microbatch": 1, **STEPS}, lambda: [KL(), EntropyBonus(0.01)]
    ),
    Configuration(
        "three epochs of four minibatches",
        {"minibatches_per_rollout": 4, "epochs_per_rollout": 3, "max_tokens_per_microbatch": 24},
        max_steps=24,
    ),
    Configuration("a tight bound on the gradient", {"max_grad_norm": 1e-3, **MANY_STEPS}),
    Configuration("a warmup from zero", {"lr_scheduler": from_zero}),
    Configuration("plain gradient descent with momentum", {"optimizer": partial(SGD, lr=0.1, momentum=0.9), **STEPS}),
    Configuration(
        "a separate critic", {"advantages": GAE(), "critic": partial(tiny_policy, 3)}, lambda: [ReferenceKL(0.1)]
    ),
    Configuration(
        "a critic without whitening",
        {"advantages": GAE(gamma=0.9, lam=0.8, whitened=False), "critic": "shared", **STEPS},
    ),
    Configuration("a critic on rewards of 1000", {**PPO, "rewards": fraction(1e3), **STEPS}),
    Configuration(
        "critic first, then the policy",
        {**PPO, "optimizer": partial(AdamW, lr=0.02), "lr_scheduler": policy_later, **STEPS},
        max_steps=12,
    ),
    Configuration("an adaptive KL in the reward", {**PPO, **STEPS}, lambda: [AdaptiveKL(0.1, target=0.02, horizon=50)]),
    Configuration(
        "dynamic sampling", {"rewards": parity_reward, **STEPS}, lambda: [DynamicSampling(), NoEOSMask("drop_tokens")]
    ),
    Configuration("dynamic sampling that drops everything", {}, lambda: [nothing_to_learn()]),
    Configuration("only ended responses rewarded", RAGGED, lambda: [NoEOSMask(), OverlongPenalty(24, 8)]),
    Configuration("mean and deviation of the batch", {"advantages": Normalized(mean="batch", std="batch")}),
    Configuration("a group mean as a function", {"advantages": centred, "rewards": fraction(0.3)}),
    Configuration("a biased deviation", {"advantages": GRPO(unbiased=False, epsilon=1e-4), "rewards": fraction(1e-3)}),
    Configuration("a loss as a function", {"loss": own_surrogate, **MANY_STEPS}),
    Configuration("a figure over unsure and over good tokens", MANY_STEPS, lambda: [UnsureTokens()]),
    Configuration("weights by the difficulty of a prompt", STEPS, lambda: [Difficulty()]),
    Configuration("a mask by the place of a token", STEPS, lambda: [EndsAlone()]),
    Configuration("adapters", {"policy": lora}, lambda: [KL()]),
    Configuration("embeddings frozen by the user", {"policy": partly_frozen, **STEPS}),
    Configuration("a rollout generated ahead", {"max_staleness": 1, **STEPS}, lambda: [TruncatedIS(), IcePop()]),
    Configuration(
        "a weight of whole responses, generated ahead",
        {"max_staleness": 1, "loss": "m2po"},
        lambda: [TruncatedIS("sequence")],
    ),
    Configuration(
        "masks by a divergence, bounded weights of a mean of one",
        {"max_staleness": 1, **STEPS},
        lambda: [DivergenceMask(0.1), TotalVariationMask(0.1), TruncatedIS("geometric", floor=0.5, normalized=True)],
    ),
    Configuration(
        "length in a group, truncation and imitation",
        STEPS,
        lambda: [LinearLengthPenalty(turns=0.1), StopProperly(0.5), PositiveNLL()],
    ),
    Configuration("penalties of distance", STEPS, lambda: [RolloutKL(), EntropyBonus(0.01, target=1.0), KL()]),
    Configuration(
        "an entropy bonus and a third bound",
        {"loss": ClippedSurrogate(dual_clip=3.0), **MANY_STEPS},
        lambda: [EntropyBonus(0.01)],
    ),
    Configuration(
        "a teacher in the reward",
        {"advantages": "reinforce_plus_plus"},
        lambda: [TeacherKL(partial(tiny_policy, 5), 0.1)],
    ),
    Configuration("top-k and top-p", {"top_k": 6, "top_p": 0.9, "temperature": 0.8, **STEPS}, lambda: [TruncatedIS()]),
    Configuration("a min-p", {"min_p": 0.1, "temperature": 1.2, **STEPS}),
    Configuration("cold", {"temperature": 0.2, "epochs_per_rollout": 2}, lambda: [KL()]),
    Configuration(
        "groups of two",
        {"group_size": 2, "advantages": "rloo", "rewards": fraction(1.0)},
        data=lambda: tiny_prompts(48, 8),
    ),
    Configuration(
        "groups of one", {"group_size": 1, "advantages": "reinforce_plus_plus"}, data=lambda: tiny_prompts(64, 16)
    ),
    Configuration(
        "answers of one token", {"max_new_tokens": 1, "rewards": fraction(1.0), "optimizer": partial(AdamW, lr=1e-3)}
    ),
    Configuration(
        "answers of very different lengths", {**RAGGED, **MANY_STEPS}, lambda: [KL(), OverlongPenalty(24, 8)]
    ),
    Configuration("sums over a constant length", {"reduction": "sequence_sum_norm", **MANY_STEPS, **RAGGED}),
    Configuration("clip-cov with wide bounds", {"loss": ClipCov(fraction=0.2, cov_low=0.0, cov_high=5.0), **STEPS}),
    Configuration(
        "the same four prompts again and again", STEPS, data=lambda: tiny_prompts(4, 4), trainer={"max_epochs": 4}
    ),
    Configuration(
        "validation of other prompts", STEPS, data=lambda: tiny_prompts(16, 4, validation=[[5, 5, n] for n in (6, 7)])
    ),
    Configuration(
        "rewards normalised over many prompts, with a critic",
        PPO,
        lambda: [RewardNormalization()],
        data=lambda: tiny_prompts(48, 16),
    ),
    Configuration(
        "rewards normalised over many prompts, with a penalty at every token",
        {"advantages": "reinforce_plus_plus"},
        lambda: [RewardNormalization(clip=1.0), ReferenceKL(0.1)],
        data=lambda: tiny_prompts(48, 16),
    ),
    Configuration(
        "weights changed for validation and put back",
        STEPS,
        lambda: [RoundedForValidation()],
        data=lambda: tiny_prompts(16, 4, validation=[[5, 5, n] for n in (6, 7)]),
    ),
    Configuration("a partner", {**CHAT, **STEPS}, lambda: [KL(), NoEOSMask()], data=chat_prompts),
    Configuration(
        "a partner who writes control tokens",
        {**CHAT, "environment": partial(Partner, hostile=True)},
        data=chat_prompts,
    ),
    Configuration("a partner of many turns", {**CHAT, **MANY_TURNS, **STEPS}, data=chat_prompts),
    Configuration("a partner that is gone for a prompt", {**CHAT, "environment": GonePartner}, data=chat_prompts),
    Configuration(
        "a partner that is back at the second try",
        CHAT,
        fresh={"environment": partial(PartnersThatBreak, 5)},
        data=chat_prompts,
    ),
    Configuration(
        "two partners by a column",
        {**CHAT, "environment": {"partner": Partner, "brief": BriefPartner}},
        data=partial(chat_prompts, environment=["partner", "brief"]),
    ),
    Configuration(
        "a partner, generated ahead", {**CHAT, "max_staleness": 1, **STEPS}, lambda: [TruncatedIS()], data=chat_prompts
    ),
    Configuration("a partner, the last answer judged", {**CHAT, "rewards": last_answer}, data=chat_prompts),
    Configuration("a tool", {**TOOLS, **STEPS}, lambda: [OverlongPenalty(16, 8), KL()], data=chat_prompts),
)


def alarms_of(configuration: Configuration, seed: int = 0) -> tuple[list[tuple[str, str]], str]:
    """Return check and culprit of every finding, and the error that ended the run, or an empty string."""
    options = {"seed": seed, **configuration.options, **{key: make() for key, make in configuration.fresh.items()}}
    settings = {"optimizer": partial(AdamW, lr=0.01), **options}
    limits: dict[str, Any] = {"max_steps": configuration.max_steps, "trainer": dict(configuration.trainer)}
    with tempfile.TemporaryDirectory() as folder:
        return audit_run(configuration.callbacks(), settings, configuration.data(), folder=Path(folder), **limits)


def main(arguments: Sequence[str]) -> int:
    """Run the configurations, list alarms, and return the exit code."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m tests.faults.clean")
    parser.add_argument("names", nargs="*", metavar="part of a name", help="run only configurations with such a name")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each configuration")
    given = parser.parse_args(arguments)
    chosen = [one for one in CONFIGURATIONS if not given.names or any(part in one.name for part in given.names)]
    alarms = 0
    for configuration in chosen:
        for seed in range(given.seeds):
            found, raised = alarms_of(configuration, seed)
            alarms += len(found) + bool(raised)
            said = [f"{check}: {culprit}" for check, culprit in sorted(set(found))] + ([raised] if raised else [])
            sys.stdout.write(f"{configuration.name:<50} seed {seed}: {'; '.join(said) or 'silent'}\n")
            sys.stdout.flush()
    sys.stdout.write(f"configurations={len(chosen)} alarms={alarms}\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
