"""I-10: every option of every exported loss, estimator and reduction changes something; its off value is its absence.

Options are read from the signatures, so that a new one without a perturbation fails.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl import (
    CISPO,
    DPPO,
    DRO,
    GAE,
    GMPO,
    GRPO,
    GSPO,
    M2PO,
    OPO,
    RLOO,
    SAPO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    DrGRPO,
    Estimator,
    KLCov,
    LossView,
    MaxRL,
    Normalized,
    RawReward,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    SequenceSumNorm,
    ValueLoss,
)
from lightning_rl.advantages import (
    GPG,
    FunctionEstimator,
    GAEOverTurns,
    HierarchicalGRPO,
    LengthAdaptive,
    OptimalTokenBaseline,
    PassAtK,
    RelativePosition,
)
from lightning_rl.losses import FunctionLoss
from lightning_rl.signal.kl import KL_ESTIMATORS, Clamped
from properties.batches import WITNESS
from properties.evaluation import Found, evaluate, same, signal_of
from properties.exports import (
    REDUCTION_EXAMPLES,
    exported_estimators,
    exported_losses,
    exported_reductions,
)


@dataclass
class Knobs:
    """Two values of each option, and values of others that it needs to act."""

    pairs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)


CLIPS = {"clip_low": (0.2, 0.4), "clip_high": (0.2, 0.4), "dual_clip": (None, 1.3)}
LOSS_KNOBS: dict[type, Knobs] = {
    ClippedSurrogate: Knobs(CLIPS),
    Reinforce: Knobs(),
    GSPO: Knobs(
        {
            "clip_low": (3e-4, 0.2),
            "clip_high": (4e-4, 0.2),
            "dual_clip": (None, 1.01),
            "per_token": (False, True),
            "anchor": ("old", "rollout"),
        },
        {"per_token": {"clip_low": 0.5, "clip_high": 0.5}},
    ),
    CISPO: Knobs({"clip_low": (1.0, 0.1), "clip_high": (4.0, 0.1), "anchor": ("old", "rollout")}),
    DPPO: Knobs(
        {"divergence": ("tv", "kl"), "low": (0.2, 0.01), "high": (0.2, 0.01), "cap": (None, 1.1)},
        {"divergence": {"low": 0.05, "high": 0.05}},
    ),
    SAPO: Knobs({"tau_positive": (1.0, 2.0), "tau_negative": (1.05, 2.0)}),
    GMPO: Knobs({"clip_low": (0.4, 0.05), "clip_high": (0.4, 0.05)}),
    VESPO: Knobs(
        {
            "k_positive": (2.0, 1.0),
            "lambda_positive": (3.0, 1.0),
            "k_negative": (3.0, 1.0),
            "lambda_negative": (2.0, 1.0),
            "anchor": ("rollout", "old"),
        }
    ),
    DRO: Knobs({"beta": (0.1, 0.2), "anchor": ("rollout", "old")}),
    ClipCov: Knobs(
        {**CLIPS, "fraction": (0.05, 0.5), "cov_low": (0.0, 0.5), "cov_high": (5.0, 0.5)},
        {name: {"fraction": 1.0, "cov_low": 0.0} for name in ("cov_low", "cov_high")} | {"fraction": {"cov_low": -9.0}},
    ),
    KLCov: Knobs({"fraction": (2e-4, 0.5), "coef": (1.0, 2.0)}),
    M2PO: Knobs({**CLIPS, "threshold": (0.04, 1e-3)}),
    FunctionLoss: Knobs({"function": (lambda view: -view.logprobs, lambda view: view.logprobs)}),
}
ESTIMATOR_KNOBS: dict[type, Knobs] = {
    FunctionEstimator: Knobs({"function": (GRPO().per_row, RLOO().per_row)}),
    GRPO: Knobs({"unbiased": (True, False), "epsilon": (1e-6, 0.1)}),
    DrGRPO: Knobs(),
    RLOO: Knobs(),
    MaxRL: Knobs({"epsilon": (1e-6, 0.1)}),
    RawReward: Knobs(),
    Normalized: Knobs(
        {
            "mean": ("group", "batch"),
            "std": ("group", "none"),
            "leave_one_out": (False, True),
            "unbiased": (True, False),
            "epsilon": (1e-6, 0.1),
        }
    ),
    OPO: Knobs(),
    ReMax: Knobs(),
    ReinforcePlusPlus: Knobs({"gamma": (1.0, 0.5), "turn_rewards": (False, True)}),
    ReinforcePlusPlusBaseline: Knobs(),
    GAE: Knobs(
        {
            "gamma": (1.0, 0.5),
            "lam": (1.0, LengthAdaptive(0.5)),
            "lam_critic": (None, RelativePosition(0.5)),
            "whitened": (True, False),
            "turn_rewards": (False, True),
        }
    ),
    GAEOverTurns: Knobs(
        {
            "gamma": (1.0, 0.5),
            "lam": (1.0, RelativePosition(0.5)),
            "lam_critic": (None, RelativePosition(0.5)),
            "whitened": (True, False),
            "turn_rewards": (False, True),
        },
    ),
    HierarchicalGRPO: Knobs({"role": ("solver", "policy"), "comparison": (GRPO(), DrGRPO())}),
    GPG: Knobs({"teaches": ("different", "nonzero")}),
    PassAtK: Knobs(
        {"scaled": (False, True), "unbiased": (True, False), "epsilon": (1e-6, 0.1)},
        {name: {"scaled": True} for name in ("unbiased", "epsilon")},
    ),
    OptimalTokenBaseline: Knobs({"bare_tail": (True, False), "importance_cap": (None, 1.1)}),
}
REDUCTION_KNOBS: dict[type, Knobs] = {SequenceSumNorm: Knobs({"length": (8, 9)})}
VALUE_KNOBS: dict[type, Knobs] = {ValueLoss: Knobs({"coef": (1.0, 0.5), "clip": (0.2, 0.05), "huber": (math.inf, 0.2)})}
KL_KNOBS: dict[type, Knobs] = {
    Clamped: Knobs(
        {
            "estimator": (KL_ESTIMATORS["k1"], KL_ESTIMATORS["k3"]),
            "value": (9.0, 0.01),
            "log_ratio": (9.0, 0.01),
        },
        {name: {"estimator": KL_ESTIMATORS["k3"]} for name in ("value", "log_ratio")},
    )
}
ALL_KNOBS = {**LOSS_KNOBS, **ESTIMATOR_KNOBS, **REDUCTION_KNOBS, **VALUE_KNOBS, **KL_KNOBS}
FAR = WITNESS.replace(
    logprobs=WITNESS.require("old_logprobs") + 2.5 * (WITNESS.logprobs - WITNESS.require("old_logprobs"))
)
"""The witness with ratios beyond every bound, on either side and for either sign."""


UNEQUAL = torch.where(WITNESS.groups == 2, 1.0, WITNESS.rewards + torch.arange(len(WITNESS)))
"""Rewards for the witness: no two of a group alike, but in its last group all of them."""


def options_of(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


def outcome(built: Any) -> list[Tensor]:
    """Everything that an object of any of these kinds gives on the witness batch."""
    if isinstance(built, Estimator):
        turns = built.turn_rewards
        found = [built(signal_of(rows, turn_rewards=turns)) for rows in (WITNESS, WITNESS.replace(rewards=UNEQUAL))]
        return [one for both in found for one in both if one is not None]
    if isinstance(built, Clamped):
        return [built(FAR.logprobs, FAR.require("ref_logprobs"))]
    if isinstance(built, SequenceSumNorm):
        return flat(evaluate(FAR, reduction=built))
    if isinstance(built, ValueLoss):
        return flat(evaluate(FAR, value_loss=built))
    return flat(evaluate(FAR, loss=built))


def flat(found: Found) -> list[Tensor]:
    return [found.loss, *found.gradients, *found.metrics.values()]


def test_every_option_of_every_export_is_perturbed() -> None:
    exported = exported_losses() | exported_estimators() | {ValueLoss, Clamped}
    exported |= {one for one in exported_reductions() if isinstance(one, type)}
    assert ALL_KNOBS.keys() == exported
    assert {kind: options_of(kind) for kind in exported} == {kind: set(own.pairs) for kind, own in ALL_KNOBS.items()}


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind, own in ALL_KNOBS.items() for option in own.pairs],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_i_10_every_option_changes_something(kind: type, option: str) -> None:
    own = ALL_KNOBS[kind]
    first, second = ({**own.beside.get(option, {}), option: value} for value in own.pairs[option])
    ours, theirs = outcome(kind(**first)), outcome(kind(**second))
    assert len(ours) == len(theirs)
    assert any(not torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def with_coefficient(option: str, coef: float) -> Found:
    if option == "value_coef":
        return evaluate(FAR, value_loss=ValueLoss(coef=coef))
    return evaluate(FAR, entropy_coef=coef)


@pytest.mark.parametrize("option", ["entropy_coef", "value_coef"])
def test_i_10_every_coefficient_of_the_loss_changes_something_and_0_is_its_absence(option: str) -> None:
    on, more, off = (with_coefficient(option, coef) for coef in (0.1, 0.2, 0.0))
    other = {"entropy_coef": "loss/value", "value_coef": "entropy/loss"}[option]
    trained = {"entropy_coef": 1, "value_coef": 2}[option]
    assert not same(on, more) and on.gradients[trained].any() and not off.gradients[trained].any()
    assert ("entropy/loss" in off.parts) == (option != "entropy_coef")
    beside = {"loss/value": 0.5, "entropy/loss": 0.1}[other] * off.parts[other]
    assert torch.equal(off.loss, off.parts["loss/policy"] + beside)


def unclipped(view: LossView) -> Tensor:
    return -torch.exp(view.logprobs - view.require("old_logprobs")) * view.require("advantages")


def unclipped_rollout(view: LossView) -> Tensor:
    return -torch.exp(view.logprobs - view.require("rollout_logprobs")) * view.require("advantages")


def weighed(view: LossView) -> Tensor:
    weight = torch.exp(view.logprobs.detach() - view.require("old_logprobs"))
    return -weight * view.require("advantages") * view.logprobs


class HalfTheSquare(ValueLoss):
    """Return a ValueLoss without its options."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns).square() / 2


INF = math.inf
OFF: list[tuple[Any, Callable[[LossView], Tensor] | Any]] = [
    (ClippedSurrogate(clip_low=1.0, clip_high=INF), unclipped),
    (ClippedSurrogate(dual_clip=INF), ClippedSurrogate(dual_clip=None)),
    (ClipCov(fraction=0.0), ClippedSurrogate()),
    (ClipCov(cov_low=1e9, cov_high=INF), ClippedSurrogate()),
    (KLCov(fraction=0.0), unclipped),
    (KLCov(coef=0.0), unclipped),
    (M2PO(threshold=INF), ClippedSurrogate()),
    (DPPO(low=INF, high=INF), unclipped_rollout),
    (DPPO(low=1.0, high=1.0), unclipped_rollout),  # no total variation is larger
    (CISPO(clip_low=1.0, clip_high=INF), weighed),
    (ValueLoss(clip=None, huber=INF), HalfTheSquare()),
    (GAE(gamma=1.0, lam=1.0, whitened=False), "rewards to go, less the value"),
    (Normalized(mean="none", std="none"), "reward"),
]


@pytest.mark.parametrize(
    ("off", "absent"), OFF, ids=lambda given: getattr(given, "__name__", str(given))[:60]
)  # no address
def test_i_10_an_off_value_is_the_absence_of_the_feature_bit_for_bit(off: Any, absent: Any) -> None:
    if isinstance(off, GAE):
        view = WITNESS.replace(values=torch.zeros_like(WITNESS.logprobs))
        signal = signal_of(view)
        shaped = torch.where(view.valid_tokens, signal.shaped, 0.0).flip(-1).cumsum(-1).flip(-1)
        assert torch.equal(off(signal).advantages, torch.where(view.valid_tokens, shaped, 0.0))
    elif isinstance(off, Normalized):
        signal = signal_of(WITNESS)
        assert torch.equal(off(signal).advantages, signal.spread_out(signal.scores))
    elif isinstance(off, ValueLoss):
        ours, theirs = evaluate(FAR, value_loss=off), evaluate(FAR, value_loss=absent)
        assert same(ours, theirs) and ours.gradients[2].any()
    else:
        loss = absent if not inspect.isfunction(absent) else FunctionLoss(absent)
        ours, theirs = evaluate(FAR, loss=off), evaluate(FAR, loss=loss)
        assert torch.equal(ours.loss, theirs.loss)
        assert all(torch.equal(one, other) for one, other in zip(ours.gradients, theirs.gradients, strict=True))


def test_i_10_without_a_bound_sequence_losses_keep_their_ratio() -> None:
    free = evaluate(FAR, loss=GSPO(clip_low=1.0, clip_high=INF)).gradients[0]
    assert free[FAR.valid_tokens].all()  # nothing is clipped away
    assert not evaluate(FAR, loss=GSPO()).gradients[0][FAR.valid_tokens].all()
    unbounded = evaluate(FAR, loss=GMPO(clip_low=INF, clip_high=INF)).gradients[0]
    assert unbounded[FAR.valid_tokens].all()
    assert not evaluate(FAR, loss=GMPO(clip_low=0.0, clip_high=0.0)).gradients[0].all()


def test_i_10_every_reduction_weighs_in_its_own_way() -> None:
    found = [evaluate(FAR, reduction=reduction).loss.item() for reduction in REDUCTION_EXAMPLES.values()]
    assert len(set(found)) == len(found)
