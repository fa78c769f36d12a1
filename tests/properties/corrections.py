"""Examples, options and exceptions of every correction, for the tests that run on each of them."""

import math
from typing import Any

from kit.support import tiny_policy

from lightning_rl import RLCallback
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    Curriculum,
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
    RoleBaseline,
    RolloutKL,
    RouterAuxLoss,
    RouterReplay,
    ScoreCentering,
    SequenceRatioMask,
    StopProperly,
    TeacherKL,
    TotalVariationMask,
    TruncatedIS,
)

EXAMPLES: list[RLCallback] = [
    NoEOSMask(),
    NoEOSMask("drop_tokens"),
    OPSM(0.05),
    OPSM(0.05, against="rollout"),
    OffPolicyIS(0.8, 1.2),
    TruncatedIS(cap=1.05),
    TruncatedIS("sequence", cap=1.1),
    TruncatedIS("geometric", cap=1.02, floor=0.98),
    TruncatedIS("sequence", cap=1.1, normalized=True),
    IcePop(0.95, 1.05),
    SequenceRatioMask("geometric"),
    SequenceRatioMask("product", 0.9, 1.1),
    SequenceRatioMask("max", 0.0, 1.1),
    DivergenceMask(1e-3),
    DivergenceMask(1e-3, divergence="k3", level="mean"),
    TotalVariationMask(0.05),
    TotalVariationMask(0.05, policy="current"),
    OutlierMask(0.9, 1.1),
    OverlongPenalty(7, 4),
    LinearLengthPenalty(0.25, context=0.1, turns=0.1),
    StopProperly(0.5),
    StopProperly(reward=-0.5),
    PositiveNLL(0.1),
    ReferenceKL(0.1),
    ReferenceKL(0.1, as_loss=True),
    RolloutKL(0.1),
    RolloutKL(0.1, estimator="k3"),
    ReferenceKL(0.1, as_loss=True, unbiased=True),
    AdaptiveKL(0.1),
    AdaptiveKL(0.1, as_loss=True),
    TeacherKL(),
    TeacherKL(None, 0.1, as_loss=True, estimator="k2"),
    DynamicSampling(),
    Curriculum("level"),
    EntropyBonus(0.1),
    EntropyBonus(0.1, target=0.5),
    RewardNormalization("group", "none"),
    RouterAuxLoss(0.1),
    RouterReplay(),
    ScoreCentering(),
    RoleBaseline(),
]
# decide by finish reason, length, reward, entropy and load of experts, not by policies
CHANGES_ON_POLICY = (
    NoEOSMask, OverlongPenalty, LinearLengthPenalty, StopProperly, PositiveNLL, DynamicSampling, EntropyBonus,
    RewardNormalization, RouterAuxLoss,
)  # fmt: skip
LOGGED_BY_THE_CORE = (DynamicSampling, RouterReplay)  # groups/sampled and groups/filtered; kl/rollout
NEEDS_DATA = (Curriculum, RoleBaseline)  # rows and columns; their options are tested in tests/callbacks
ACTS_ELSEWHERE = (Curriculum, RoleBaseline, RouterReplay)  # on prompts, columns of the data and the policy
INF = math.inf
BAND = {"low": (0.9, 0.99), "high": (1.1, 1.01)}
KL = {"estimator": ("k3", "k2"), "as_loss": (False, True), "unbiased": (False, True)}
AS_LOSS = {"unbiased": {"as_loss": True}}
BESIDE: dict[type, dict[str, dict[str, Any]]] = {
    ReferenceKL: AS_LOSS, TeacherKL: AS_LOSS, AdaptiveKL: AS_LOSS,
    EntropyBonus: {"step": {"target": 9.0}},
    SequenceRatioMask: {name: {"statistic": "geometric"} for name in ("low", "high")},
    DivergenceMask: {name: {"bound": 1e-3} for name in ("divergence", "level")},
    TotalVariationMask: {"policy": {"bound": 0.01}},
    OverlongPenalty: {"max_length": {"cache": 2}, "cache": {"max_length": 6}, "coef": {"max_length": 6, "cache": 2}},
}  # fmt: skip
KNOBS: dict[type, dict[str, tuple[Any, Any]]] = {
    NoEOSMask: {"action": ("zero_reward", "drop_tokens")},
    OPSM: {"delta": (1e-4, 0.2), "against": ("old", "rollout")},
    OffPolicyIS: {"min_ratio": (0.0, 0.95), "max_ratio": (2.0, 1.05)},
    TruncatedIS: {
        "level": ("token", "geometric"), "cap": (None, 1.05), "floor": (0.0, 0.99), "normalized": (False, True),
    },
    IcePop: BAND,
    SequenceRatioMask: {"statistic": ("geometric", "max"), **BAND},
    DivergenceMask: {"bound": (1e-3, 0.1), "divergence": ("binary_kl", "k2"), "level": ("token", "max")},
    TotalVariationMask: {"bound": (0.01, 9.0), "policy": ("old", "current")},
    LinearLengthPenalty: {"tokens": (0.25, 0.5), "context": (0.0, 0.1), "turns": (0.0, 0.1)},
    StopProperly: {"scale": (0.0, 0.5), "reward": (None, -1.0)},
    PositiveNLL: {"coef": (0.1, 0.2), "threshold": (0.0, 1.5), "correct_by": ("task", "other")},
    OutlierMask: BAND,
    OverlongPenalty: {"max_length": (6, 5), "cache": (2, 4), "coef": (1.0, 0.5)},
    ReferenceKL: {"beta": (0.05, 0.1), **KL},
    RolloutKL: {"coef": (0.1, 0.2), "estimator": ("k2", "k3")},
    AdaptiveKL: {"beta": (0.05, 0.1), "target": (0.1, 0.01), "horizon": (100, 10), **KL},
    TeacherKL: {"teacher": (None, tiny_policy), "beta": (0.5, 1.0), **KL},
    Curriculum: {
        "column": ("level", "source"), "temperature": (0.1, 1.0), "rate": (0.5, 0.1), "mastered": (1.0, None),
        "correct_by": ("task", "other"),
    },
    DynamicSampling: {"tolerance": (1e-6, 0.9), "max_rounds": (10, 2), "correct_by": ("task", "other")},
    EntropyBonus: {"coef": (0.01, 0.02), "target": (None, 9.0), "step": (0.005, 0.01)},
    RewardNormalization: {
        "mean": ("batch", "group"), "std": ("batch", "none"), "leave_one_out": (False, True),
        "unbiased": (True, False), "epsilon": (1e-6, 0.1), "clip": (INF, 0.5),
        "weights": (None, {"task": 2.0, "other": 1.0}),
    },
    RoleBaseline: {"column": ("role", "game"), "decay": (0.95, 0.5)},
    RouterAuxLoss: {"coef": (0.001, 0.1)},
    RouterReplay: {},
    ScoreCentering: {"k": (32, None)},
}  # fmt: skip
OFF: dict[type, list[RLCallback]] = {
    OPSM: [OPSM(INF), OPSM(INF, against="rollout")],
    OffPolicyIS: [OffPolicyIS(1.0, 1.0)],
    IcePop: [IcePop(0.0, INF)],
    SequenceRatioMask: [SequenceRatioMask(name, 0.0, INF) for name in ("geometric", "product", "max")],
    DivergenceMask: [DivergenceMask(INF), DivergenceMask(INF, level="sum")],
    TotalVariationMask: [TotalVariationMask(INF), TotalVariationMask(INF, policy="current")],
    TruncatedIS: [TruncatedIS(cap=1.0, floor=1.0)],
    LinearLengthPenalty: [LinearLengthPenalty(0.0)],
    StopProperly: [StopProperly(1.0)],
    PositiveNLL: [PositiveNLL(0.0)],
    OutlierMask: [OutlierMask(0.0, INF)],
    OverlongPenalty: [OverlongPenalty(6, 4, coef=0.0)],
    ReferenceKL: [ReferenceKL(0.0), ReferenceKL(0.0, as_loss=True), ReferenceKL(0.0, as_loss=True, unbiased=True)],
    RolloutKL: [RolloutKL(0.0), RolloutKL(0.0, estimator="k3")],
    TeacherKL: [TeacherKL(None, 0.0), TeacherKL(None, 0.0, as_loss=True)],
    EntropyBonus: [EntropyBonus(0.0)],
    RewardNormalization: [RewardNormalization("none", "none")],
    RoleBaseline: [RoleBaseline(decay=1.0)],
    RouterAuxLoss: [RouterAuxLoss(0.0)],
}
WITHOUT_OFF_VALUE = {
    AdaptiveKL,
    Curriculum,
    NoEOSMask,
    DynamicSampling,
    RouterReplay,
    ScoreCentering,
}  # at 0 one could not adapt
