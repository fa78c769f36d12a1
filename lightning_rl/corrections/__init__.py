"""Base class of corrections, their inputs, and the combination of their contributions."""

from lightning_rl.corrections.combine import Corrections
from lightning_rl.corrections.recorded import ReplayCorrections
from lightning_rl.corrections.rl_callback import (
    CONTRIBUTIONS,
    MADE_AFTER,
    POLICY_LOSS_FACTORS,
    REWARDS,
    ROW_REWARDS,
    TOKEN_REWARDS,
    Contribution,
    LossTerm,
    RLCallback,
)
from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.trace import MicrobatchTrace, StepTrace
from lightning_rl.corrections.view import OUTPUTS, LossView, Outputs, outputs_from

__all__ = [
    "CONTRIBUTIONS",
    "MADE_AFTER",
    "OUTPUTS",
    "POLICY_LOSS_FACTORS",
    "REWARDS",
    "ROW_REWARDS",
    "TOKEN_REWARDS",
    "Contribution",
    "Corrections",
    "LossTerm",
    "LossView",
    "MicrobatchTrace",
    "Outputs",
    "RLCallback",
    "ReplayCorrections",
    "Stat",
    "StepTrace",
    "outputs_from",
]
