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
from lightning_rl.corrections.view import FURTHER_OUTPUTS, LossView

__all__ = [
    "CONTRIBUTIONS",
    "FURTHER_OUTPUTS",
    "MADE_AFTER",
    "POLICY_LOSS_FACTORS",
    "REWARDS",
    "ROW_REWARDS",
    "TOKEN_REWARDS",
    "Contribution",
    "Corrections",
    "LossTerm",
    "LossView",
    "MicrobatchTrace",
    "RLCallback",
    "ReplayCorrections",
    "Stat",
    "StepTrace",
]
