"""Properties of an algorithm: checks of losses, estimators and corrections on a few rows, without a run."""

from lightning_rl.testing.properties import (
    contribution_checks,
    formula_checks,
    hyperparameter_checks,
    loss_checks,
    loss_term_checks,
    metric_checks,
    ratio_checks,
    signal_checks,
)
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import Check, checks_in

PROPERTIES: dict[str, Check[AlgorithmCase]] = checks_in(
    signal_checks,
    contribution_checks,
    loss_checks,
    loss_term_checks,
    formula_checks,
    ratio_checks,
    hyperparameter_checks,
    metric_checks,
)
"""Checks of an algorithm by name."""
