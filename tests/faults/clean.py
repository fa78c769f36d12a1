"""Valid configurations, for which the audit must report nothing.

``python -m tests.faults.clean [--seeds N] [part of a name ...]`` lists alarms, and ends with
``configurations=N alarms=N``. The configurations were written without the checks in view.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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

from faults.fault import STEPS, Fault, correction
from faults.runs import audit_run
from lightning_rl import (
    GAE,
    ClipCov,
    ClippedSurrogate,
    LossView,
    Normalized,
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

MANY_STEPS = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2, "max_tokens_per_microbatch": 24}
PPO = {"advantages": GAE(lam=0.95), "critic": "shared"}
MANY_TURNS = {"max_turns": 6, "max_new_tokens": 8}
RAGGED = {"max_new_tokens": 24, "eos_token_ids": [1, 5, 9]}


def configuration(
    name: str, options: Mapping[str, Any] | None = None, callbacks: Callable[[], list[Any]] = list, **given: Any
) -> Fault:
    """Return a run without a fault."""
    known: dict[str, Any] = {"data": lambda: tiny_prompts(24, 4), "max_steps": 8, **given}
    return Fault(name, "", options=options or {}, callbacks=callbacks, **known)


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


def unsure_tokens(view: LossView) -> Mapping[str, Stat]:
    unsure, good = view.entropy.detach() > 1.0, view.require("advantages") > 0
    return {
        "unsure_tokens/logprob": Stat.of(view.logprobs, view.valid_tokens & unsure),
        "unsure_tokens/good": Stat.of(view.entropy, view.valid_tokens & good),
    }


def difficulty(view: LossView) -> Tensor:
    weight = view.extras["weight"].to(view.logprobs.dtype)
    return weight[:, None].expand_as(view.logprobs).detach()


def provided_difficulty(rollout: Rollout) -> Mapping[str, Tensor]:
    weight = torch.ones(len(rollout), dtype=rollout.rewards.dtype)
    for group in rollout.groups.unique():
        rows = rollout.groups == group
        weight[rows] = 1.5 - (rollout.rewards[rows].mean().clamp(0, 1) - 0.5).abs()
    return {"extras/weight": weight}


def ends_alone(view: LossView) -> Tensor:
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


def preset(name: str, **options: Any) -> Fault:
    """Return a preset at four optimizer steps per rollout if it takes several."""
    recipe = presets.PRESETS[name](**options)
    steps = {} if name == "rloo" else STEPS
    given = {key: value for key, value in recipe.options.items() if key != "sampling"}
    return configuration(
        f"preset {name}", {"max_new_tokens": 8, **given, **steps}, lambda: [*presets.PRESETS[name](**options).callbacks]
    )


def every_correction(name: str, precision: str) -> Fault:
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
    return configuration(
        f"{name} with every correction, {precision}", options, corrections, trainer={"precision": precision}
    )


def with_loss(name: str) -> Fault:
    """Return a loss by name, with several steps."""
    reduction = {"reduction": "sequence_mean"} if name == "gspo" else {}
    return configuration(f"loss {name}", {"loss": name, **reduction, **({} if name == "reinforce" else MANY_STEPS)})


def with_estimator(name: str) -> Fault:
    """Return an estimator by name, with fractional rewards."""
    critic = {"critic": "shared"} if name == "gae" else {}
    return configuration(
        f"estimator {name}, fractional reward", {"advantages": name, "rewards": fraction(1.0), **critic, **STEPS}
    )


KL = partial(ReferenceKL, 0.1, as_loss=True)

CONFIGURATIONS: tuple[Fault, ...] = (
    configuration("everything by default"),
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
        configuration(f"rewards of {scale:g}", {"rewards": fraction(scale), "advantages": "grpo", **STEPS})
        for scale in (1e-3, 1e3)
    ],
    configuration("several rewards", {"rewards": {"a": (fraction(0.1), 0.3), "b": parity_reward, "c": (sparse, 0.0)}}),
    configuration("a reward that often does not apply", {"rewards": sparse}),
    configuration("a reward that is the same for all", {"rewards": constant}),
    configuration("weights in float64", {"policy": partial(tiny_policy, dtype=torch.float64), **STEPS}, lambda: [KL()]),
    configuration(
        "weights in bfloat16",
        {"optimizer": partial(AdamW, lr=0.01), **STEPS},
        lambda: [KL()],
        trainer={"precision": "bf16-true"},
    ),
    configuration("bf16-mixed", {**STEPS}, lambda: [KL()], trainer={"precision": "bf16-mixed"}),
    configuration("bf16-true", {"rewards": fraction(1.0)}, trainer={"precision": "bf16-true"}),
    configuration(
        "bf16-mixed with a critic", {**PPO, **STEPS}, lambda: [ReferenceKL(0.1)], trainer={"precision": "bf16-mixed"}
    ),
    configuration("without packing", {"packing": False, **MANY_STEPS, **RAGGED}, lambda: [KL()]),
    configuration("activations computed again", {"activation_checkpointing": True, **STEPS}, lambda: [KL()]),
    configuration(
        "a row in every microbatch", {"max_tokens_per_microbatch": 1, **STEPS}, lambda: [KL(), EntropyBonus(0.01)]
    ),
    configuration(
        "three epochs of four minibatches",
        {"minibatches_per_rollout": 4, "epochs_per_rollout": 3, "max_tokens_per_microbatch": 24},
        max_steps=24,
    ),
    configuration("a tight bound on the gradient", {"max_grad_norm": 1e-3, **MANY_STEPS}),
    configuration("a warmup from zero", {"lr_scheduler": from_zero}),
    configuration("plain gradient descent with momentum", {"optimizer": partial(SGD, lr=0.1, momentum=0.9), **STEPS}),
    configuration(
        "a separate critic", {"advantages": GAE(), "critic": partial(tiny_policy, 3)}, lambda: [ReferenceKL(0.1)]
    ),
    configuration(
        "a critic without whitening",
        {"advantages": GAE(gamma=0.9, lam=0.8, whitened=False), "critic": "shared", **STEPS},
    ),
    configuration("a critic on rewards of 1000", {**PPO, "rewards": fraction(1e3), **STEPS}),
    configuration(
        "critic first, then the policy",
        {**PPO, "optimizer": partial(AdamW, lr=0.02), "lr_scheduler": policy_later, **STEPS},
        max_steps=12,
    ),
    configuration("an adaptive KL in the reward", {**PPO, **STEPS}, lambda: [AdaptiveKL(0.1, target=0.02, horizon=50)]),
    configuration(
        "dynamic sampling", {"rewards": parity_reward, **STEPS}, lambda: [DynamicSampling(), NoEOSMask("drop_tokens")]
    ),
    configuration("dynamic sampling that drops everything", {}, lambda: [nothing_to_learn()]),
    configuration("only ended responses rewarded", RAGGED, lambda: [NoEOSMask(), OverlongPenalty(24, 8)]),
    configuration("mean and deviation of the batch", {"advantages": Normalized(mean="batch", std="batch")}),
    configuration("a group mean as a function", {"advantages": centred, "rewards": fraction(0.3)}),
    configuration("a biased deviation", {"advantages": GRPO(unbiased=False, epsilon=1e-4), "rewards": fraction(1e-3)}),
    configuration("a loss as a function", {"loss": own_surrogate, **MANY_STEPS}),
    configuration(
        "a figure over unsure and over good tokens", MANY_STEPS, lambda: [correction(metrics=unsure_tokens)()]
    ),
    configuration(
        "weights by the difficulty of a prompt",
        STEPS,
        lambda: [correction(token_weight=difficulty, provide=provided_difficulty, compares_rows=True)()],
    ),
    configuration("a mask by the place of a token", STEPS, lambda: [correction(token_mask=ends_alone)()]),
    configuration("adapters", {"policy": lora}, lambda: [KL()]),
    configuration("embeddings frozen by the user", {"policy": partly_frozen, **STEPS}),
    configuration("a rollout generated ahead", {"max_staleness": 1, **STEPS}, lambda: [TruncatedIS(), IcePop()]),
    configuration(
        "a weight of whole responses, generated ahead",
        {"max_staleness": 1, "loss": "m2po"},
        lambda: [TruncatedIS("sequence")],
    ),
    configuration(
        "masks by a divergence, bounded weights of a mean of one",
        {"max_staleness": 1, **STEPS},
        lambda: [DivergenceMask(0.1), TotalVariationMask(0.1), TruncatedIS("geometric", floor=0.5, normalized=True)],
    ),
    configuration(
        "length in a group, truncation and imitation",
        STEPS,
        lambda: [LinearLengthPenalty(turns=0.1), StopProperly(0.5), PositiveNLL()],
    ),
    configuration("penalties of distance", STEPS, lambda: [RolloutKL(), EntropyBonus(0.01, target=1.0), KL()]),
    configuration(
        "an entropy bonus and a third bound",
        {"loss": ClippedSurrogate(dual_clip=3.0), **MANY_STEPS},
        lambda: [EntropyBonus(0.01)],
    ),
    configuration(
        "a teacher in the reward",
        {"advantages": "reinforce_plus_plus"},
        lambda: [TeacherKL(partial(tiny_policy, 5), 0.1)],
    ),
    configuration("top-k and top-p", {"top_k": 6, "top_p": 0.9, "temperature": 0.8, **STEPS}, lambda: [TruncatedIS()]),
    configuration("a min-p", {"min_p": 0.1, "temperature": 1.2, **STEPS}),
    configuration("cold", {"temperature": 0.2, "epochs_per_rollout": 2}, lambda: [KL()]),
    configuration(
        "groups of two",
        {"group_size": 2, "advantages": "rloo", "rewards": fraction(1.0)},
        data=lambda: tiny_prompts(48, 8),
    ),
    configuration(
        "groups of one", {"group_size": 1, "advantages": "reinforce_plus_plus"}, data=lambda: tiny_prompts(64, 16)
    ),
    configuration(
        "answers of one token", {"max_new_tokens": 1, "rewards": fraction(1.0), "optimizer": partial(AdamW, lr=1e-3)}
    ),
    configuration(
        "answers of very different lengths", {**RAGGED, **MANY_STEPS}, lambda: [KL(), OverlongPenalty(24, 8)]
    ),
    configuration("sums over a constant length", {"reduction": "sequence_sum_norm", **MANY_STEPS, **RAGGED}),
    configuration("clip-cov with wide bounds", {"loss": ClipCov(fraction=0.2, cov_low=0.0, cov_high=5.0), **STEPS}),
    configuration(
        "the same four prompts again and again", STEPS, data=lambda: tiny_prompts(4, 4), trainer={"max_epochs": 4}
    ),
    configuration(
        "validation of other prompts", STEPS, data=lambda: tiny_prompts(16, 4, validation=[[5, 5, n] for n in (6, 7)])
    ),
    configuration(
        "rewards normalised over many prompts, with a critic",
        PPO,
        lambda: [RewardNormalization()],
        data=lambda: tiny_prompts(48, 16),
    ),
    configuration(
        "rewards normalised over many prompts, with a penalty at every token",
        {"advantages": "reinforce_plus_plus"},
        lambda: [RewardNormalization(clip=1.0), ReferenceKL(0.1)],
        data=lambda: tiny_prompts(48, 16),
    ),
    configuration(
        "weights changed for validation and put back",
        STEPS,
        lambda: [RoundedForValidation()],
        data=lambda: tiny_prompts(16, 4, validation=[[5, 5, n] for n in (6, 7)]),
    ),
    configuration("a partner", {**CHAT, **STEPS}, lambda: [KL(), NoEOSMask()], data=chat_prompts),
    configuration(
        "a partner who writes control tokens",
        {**CHAT, "environment": partial(Partner, hostile=True)},
        data=chat_prompts,
    ),
    configuration("a partner of many turns", {**CHAT, **MANY_TURNS, **STEPS}, data=chat_prompts),
    configuration("a partner that is gone for a prompt", {**CHAT, "environment": GonePartner}, data=chat_prompts),
    configuration(
        "a partner that is back at the second try",
        CHAT,
        fresh={"environment": partial(PartnersThatBreak, 5)},
        data=chat_prompts,
    ),
    configuration(
        "two partners by a column",
        {**CHAT, "environment": {"partner": Partner, "brief": BriefPartner}},
        data=partial(chat_prompts, environment=["partner", "brief"]),
    ),
    configuration(
        "a partner, generated ahead", {**CHAT, "max_staleness": 1, **STEPS}, lambda: [TruncatedIS()], data=chat_prompts
    ),
    configuration("a partner, the last answer judged", {**CHAT, "rewards": last_answer}, data=chat_prompts),
    configuration("a tool", {**TOOLS, **STEPS}, lambda: [OverlongPenalty(16, 8), KL()], data=chat_prompts),
)


def alarms_of(clean: Fault, seed: int = 0) -> tuple[list[tuple[str, str]], str]:
    """Return check and culprit of every finding, and the error that ended the run, or an empty string."""
    callbacks, options, data = clean.parts()
    settings = {"seed": seed, "optimizer": partial(AdamW, lr=0.01), **options}
    limits: dict[str, Any] = {"max_steps": clean.max_steps, "trainer": dict(clean.trainer)}
    with tempfile.TemporaryDirectory() as folder:
        return audit_run(callbacks, settings, data, folder=Path(folder), **limits)


def main(arguments: Sequence[str]) -> int:
    """Run the configurations, list alarms, and return the exit code."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m tests.faults.clean")
    parser.add_argument("names", nargs="*", metavar="part of a name", help="run only configurations with such a name")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each configuration")
    given = parser.parse_args(arguments)
    chosen = [one for one in CONFIGURATIONS if not given.names or any(part in one.name for part in given.names)]
    alarms = 0
    for clean in chosen:
        for seed in range(given.seeds):
            found, raised = alarms_of(clean, seed)
            alarms += len(found) + bool(raised)
            said = [f"{check}: {culprit}" for check, culprit in sorted(set(found))] + ([raised] if raised else [])
            sys.stdout.write(f"{clean.name:<50} seed {seed}: {'; '.join(said) or 'silent'}\n")
            sys.stdout.flush()
    sys.stdout.write(f"configurations={len(chosen)} alarms={alarms}\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
