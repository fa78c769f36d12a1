"""I-10: every option of every exported correction changes something; its off value is its absence, bit for bit.

Options are read from the signatures, so that a new one without a perturbation fails.
"""

import copy
import inspect
from typing import Any

import pytest
import torch
from kit.support import an_algorithm
from torch import Tensor

from lightning_rl import GAE, LossView, RLCallback
from lightning_rl.callbacks import OPSM, AdaptiveKL, EntropyBonus, TeacherKL
from lightning_rl.corrections import Corrections
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from properties.batches import WITNESS
from properties.corrections import BESIDE, KNOBS, NEEDS_DATA, OFF, WITHOUT_OFF_VALUE
from properties.evaluation import evaluate
from properties.exports import CORRECTIONS


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
    [(kind, option) for kind, pairs in KNOBS.items() for option in pairs if kind not in NEEDS_DATA],
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
