"""One example or more of everything that the package exports and that a property should hold for."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import lightning_rl.advantages
import lightning_rl.losses
import lightning_rl.signal.reductions
from lightning_rl import (
    CISPO,
    DPPO,
    DRO,
    GAE,
    GMPO,
    GSPO,
    M2PO,
    RLOO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    DrGRPO,
    Estimator,
    KLCov,
    Normalized,
    PolicyLoss,
    ReinforcePlusPlus,
    RLCallback,
    SequenceSumNorm,
    ValueLoss,
)
from lightning_rl.advantages import (
    ESTIMATORS,
    GPG,
    FunctionEstimator,
    GAEOverTurns,
    HierarchicalGRPO,
    LengthAdaptive,
    OptimalTokenBaseline,
    PassAtK,
    RelativePosition,
)
from lightning_rl.corrections import OUTPUTS
from lightning_rl.losses import LOSSES, FunctionLoss
from lightning_rl.signal.reductions import REDUCTIONS, Reduction

LOSS_EXAMPLES: dict[str, PolicyLoss] = {
    **LOSSES,
    "ppo-dual": ClippedSurrogate(clip_low=0.1, clip_high=0.3, dual_clip=1.2),
    "gspo-wide": GSPO(clip_low=0.2, clip_high=0.2),
    "gspo-dual": GSPO(clip_low=0.2, clip_high=0.2, dual_clip=1.05),
    "gspo-rollout": GSPO(clip_low=0.2, clip_high=0.2, anchor="rollout"),
    "vespo-old": VESPO(anchor="old"),
    "dro-old": DRO(beta=0.5, anchor="old"),
    "gmpo-tight": GMPO(clip_low=0.02, clip_high=0.05),
    "gspo-per-token": GSPO(clip_low=0.2, clip_high=0.2, per_token=True),
    "cispo-rollout": CISPO(clip_low=0.2, clip_high=0.2, anchor="rollout"),
    "dppo-kl": DPPO(divergence="kl", low=0.01, high=0.01),
    "dppo-capped": DPPO(cap=1.1),
    "clip_cov-some": ClipCov(fraction=0.2, cov_low=0.0, cov_high=5.0),
    "clip_cov-all": ClipCov(fraction=1.0, cov_low=-1.0, cov_high=math.inf),
    "kl_cov-some": KLCov(fraction=0.3, coef=0.5),
    "m2po-tight": M2PO(threshold=0.005),
    "function": FunctionLoss(lambda view: -view.require("advantages") * view.logprobs),
}

ESTIMATOR_EXAMPLES: dict[str, Estimator] = {
    **ESTIMATORS,
    "lite-ppo": Normalized(std="batch"),
    "batch": Normalized(mean="batch", std="batch"),
    "batch-rloo": Normalized(mean="batch", std="none", leave_one_out=True),
    "group-biased": Normalized(unbiased=False),
    "raw": Normalized(mean="none", std="none"),
    "scaled": Normalized(mean="none", std="group"),
    "gae-raw": GAE(gamma=0.9, lam=0.8, whitened=False),
    "gae-vapo": GAE(lam=LengthAdaptive(0.5), lam_critic=1.0, whitened=False),
    "gae-relative": GAE(lam=RelativePosition(0.5)),
    "gae_over_turns-raw": GAEOverTurns(gamma=0.9, lam=0.8, whitened=False),
    "gae_over_turns-critic": GAEOverTurns(lam=LengthAdaptive(0.5), lam_critic=1.0, whitened=False),
    "hierarchical_grpo-mean": HierarchicalGRPO(comparison=DrGRPO()),
    "gpg-nonzero": GPG(teaches="nonzero"),
    "pass_at_k-scaled": PassAtK(scaled=True),
    "otb-tail": OptimalTokenBaseline(bare_tail=False),
    "otb-weighed": OptimalTokenBaseline(importance_cap=1.1),
    "rpp-discounted": ReinforcePlusPlus(gamma=0.9),
    "function": FunctionEstimator(RLOO().per_row),
}

REDUCTION_EXAMPLES: dict[str, Reduction] = {**REDUCTIONS, "sequence_sum_norm": SequenceSumNorm(8)}

VALUE_EXAMPLES: dict[str, ValueLoss] = {
    "clipped": ValueLoss(),
    "plain": ValueLoss(clip=None),
    "huber": ValueLoss(clip=None, huber=0.5),
    "clipped-huber": ValueLoss(clip=0.1, huber=0.3),
}


def correction_examples() -> list[RLCallback]:
    """Fresh copies of the examples that ``tests/callbacks/test_every_correction.py`` keeps complete."""
    path = Path(__file__).with_name("corrections.py")
    spec = importlib.util.spec_from_file_location("properties_fresh_corrections", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.EXAMPLES


CORRECTIONS = correction_examples()
FOLLOWS = "rollout_kl"
"""Field of a term that is no distance by itself: it is weighed by the derivative of the policy loss."""


def corrections_with(*methods: str) -> list[RLCallback]:
    """The examples that offer one of some contribution methods."""
    return [correction for correction in CORRECTIONS if correction.contributes & set(methods)]


def quick(examples: Iterable[str]) -> list[Any]:
    """Return parameters for names of examples, nightly if another configuration of the same object is one."""
    return [pytest.param(name, marks=pytest.mark.nightly) if "-" in name else name for name in examples]


def quick_corrections() -> list[Any]:
    """Return parameters for the numbers of :data:`CORRECTIONS`, nightly if an earlier one is of the same class."""
    names = [name_of(correction) for correction in CORRECTIONS]
    return [
        pytest.param(number, id=f"{name}-{number}", marks=[pytest.mark.nightly] if name in names[:number] else [])
        for number, name in enumerate(names)
    ]


def leaf_of(correction: RLCallback) -> str:
    """The output of the policy through which a loss term trains."""
    read = [spec.name for spec in OUTPUTS if spec.inputs and spec.name in correction.reads_at_loss]
    return "entropy" if correction.trains_entropy else next(iter(read), "logprobs")


def name_of(correction: RLCallback) -> str:
    """A test id."""
    return type(correction).__name__


def exported_losses() -> set[type]:
    """Every policy loss that ``lightning_rl.losses`` exports."""
    named = [getattr(lightning_rl.losses, name) for name in lightning_rl.losses.__all__]
    return {one for one in named if inspect.isclass(one) and issubclass(one, PolicyLoss) and not _abstract(one)}


def exported_estimators() -> set[type]:
    """Every estimator that ``lightning_rl.advantages`` defines."""
    named = vars(lightning_rl.advantages).values()
    return {one for one in named if inspect.isclass(one) and issubclass(one, Estimator) and not _abstract(one)}


def exported_reductions() -> set[Any]:
    """Every class and public function of four arguments that the reductions' module defines."""
    module = lightning_rl.signal.reductions
    own = [one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__]
    arguments = ["valid_tokens", "trained", "groups", "global_sum"]
    functions = {one for one in own if inspect.isfunction(one) and list(inspect.signature(one).parameters) == arguments}
    return functions | {one for one in own if inspect.isclass(one)}


def _abstract(kind: type) -> bool:
    return inspect.isabstract(kind)
