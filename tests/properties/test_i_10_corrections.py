"""I-10: every option of every exported correction changes something; its off value is its absence, bit for bit.

Options are read from the signatures, so that a new one without a perturbation fails.
"""

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, tiny_policy
from torch import Tensor

from lightning_rl import GAE, LossView, RLCallback
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
    RouterAuxLoss,
    RouterReplay,
    ScoreCentering,
    SequenceRatioMask,
    StopProperly,
    TeacherKL,
    TotalVariationMask,
    TruncatedIS,
)
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from properties.batches import WITNESS
from properties.evaluation import evaluate
from properties.exports import CORRECTIONS

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
    DynamicSampling: {"tolerance": (1e-6, 0.9), "max_rounds": (10, 2), "correct_by": ("task", "other")},
    EntropyBonus: {"coef": (0.01, 0.02), "target": (None, 9.0), "step": (0.005, 0.01)},
    RewardNormalization: {
        "mean": ("batch", "group"), "std": ("batch", "none"), "leave_one_out": (False, True),
        "unbiased": (True, False), "epsilon": (1e-6, 0.1), "clip": (INF, 0.5),
        "weights": (None, {"task": 2.0, "other": 1.0}),
    },
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
    RouterAuxLoss: [RouterAuxLoss(0.0)],
}
WITHOUT_OFF_VALUE = {AdaptiveKL, NoEOSMask, DynamicSampling, RouterReplay, ScoreCentering}  # at 0 one could not adapt


def outcome(correction: RLCallback) -> dict[str, Any]:
    """Everything that a correction does on the witness batch, from the reward to the gradient, and what it learns."""
    correction = copy.copy(correction)
    trial = not (isinstance(correction, TeacherKL) and correction.teacher)  # its teacher needs a fit
    corrections = Corrections([correction]) if trial else Corrections()
    view = WITNESS.replace(rewarded=WITNESS.rewarded & corrections.reward_mask(WITNESS))
    kept = corrections.keep_groups(view)
    excluded = exclude_rows(view, corrections)[0]
    signalled, *_ = estimate_signal(excluded, GAE(lam=0.9, whitened=False), corrections)
    if isinstance(correction, AdaptiveKL):
        correction.observe(signalled)
    if isinstance(correction, EntropyBonus):
        correction.adapt(torch.tensor([[3.0, 1.5, 0.0, 2.0]], dtype=torch.float64))
    assert isinstance(signalled, LossView)
    found = evaluate(signalled, callbacks=list(corrections.callbacks))
    stats = {name: stat.moments for name, stat in corrections.rollout_metrics(view).items()}
    return {
        "kept": kept, "advantages": signalled.require("advantages"), "loss": found.loss, "gradient": found.gradients,
        "metrics": {**found.metrics, **stats}, "rounds": correction.max_rounds, "offers": correction.contributes,
        "parts": found.parts, "asks of the engine": (correction.records, getattr(correction, "k", None)),
        "next coefficient": getattr(correction, "beta", None) if isinstance(correction, AdaptiveKL) else None,
    }  # fmt: skip


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return ours.shape == theirs.shape and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple):
        return all(equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return ours == theirs


def test_every_option_of_every_correction_is_perturbed() -> None:
    exported = {type(correction) for correction in CORRECTIONS}
    options = {kind: set(inspect.signature(kind).parameters) for kind in exported}
    assert {kind: set(pairs) for kind, pairs in KNOBS.items()} == options
    assert OFF.keys() | WITHOUT_OFF_VALUE == exported and not OFF.keys() & WITHOUT_OFF_VALUE


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind, pairs in KNOBS.items() for option in pairs],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_i_10_every_option_changes_something(kind: type, option: str) -> None:
    first, second = KNOBS[kind][option]
    beside = BESIDE.get(kind, {}).get(option, {})
    ours, same_again, theirs = (outcome(kind(**{**beside, option: value})) for value in (first, first, second))
    assert equal(ours, same_again)
    assert not equal(ours, theirs)


@pytest.mark.parametrize(
    "correction", [one for ones in OFF.values() for one in ones], ids=lambda one: type(one).__name__
)
def test_i_10_an_off_value_is_the_absence_of_the_correction_bit_for_bit(correction: RLCallback) -> None:
    found, plain = outcome(correction), outcome(RLCallback().with_name("nothing"))
    for what in ("kept", "advantages", "loss", "gradient"):
        assert equal(found[what], plain[what]), what
    shared = plain["metrics"].keys()
    assert all(equal(found["metrics"][name], plain["metrics"][name]) for name in shared)


def test_i_10_an_algorithm_trains_the_entropy_only_if_somebody_asks() -> None:
    def trains(*callbacks: RLCallback) -> bool:
        return an_algorithm(callbacks).trains_entropy

    assert [trains(), trains(EntropyBonus()), trains(OPSM()), trains(OPSM(), EntropyBonus())] == [
        False, True, False, True,
    ]  # fmt: skip
