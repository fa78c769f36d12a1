"""Reinforcement learning of language models as plain PyTorch Lightning, with every signal checked."""

from lightning_rl.advantages import (
    GAE,
    OPO,
    Advantages,
    Estimator,
    Normalised,
    PerRow,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    RewardSignal,
)
from lightning_rl.checkpoints import AtomicCheckpointIO, latest_checkpoint
from lightning_rl.data import Prompt, PromptDataModule, Ticket
from lightning_rl.distributed import FSDP2Strategy
from lightning_rl.generation import Completion, Engine, FakeEngine, Request, TransformersEngine
from lightning_rl.hooks import Contributions, LossTerm, LossView, RLCallback, Stat
from lightning_rl.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    FunctionLoss,
    KLCov,
    PolicyLoss,
    Reinforce,
    ValueLoss,
)
from lightning_rl.module import RLLightningModule
from lightning_rl.objective import LossParts, Objective
from lightning_rl.rollout import Finish, Rollout, concatenate
from lightning_rl.schedules import adamw_8bit, warmup_then_linear
from lightning_rl.signal.advantages import dr_grpo, grpo, maxrl, reinforce, rloo
from lightning_rl.signal.reductions import SequenceSumNorm, prompt_mean, sequence_mean, token_mean

__all__ = [
    "Advantages",
    "AtomicCheckpointIO",
    "CISPO",
    "ClipCov",
    "ClippedSurrogate",
    "Completion",
    "Contributions",
    "DPPO",
    "Engine",
    "Estimator",
    "FSDP2Strategy",
    "FakeEngine",
    "Finish",
    "FunctionLoss",
    "GAE",
    "GMPO",
    "GSPO",
    "KLCov",
    "LossParts",
    "LossTerm",
    "LossView",
    "M2PO",
    "Normalised",
    "OPO",
    "Objective",
    "PerRow",
    "PolicyLoss",
    "Prompt",
    "PromptDataModule",
    "RLCallback",
    "RLLightningModule",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Request",
    "RewardSignal",
    "Rollout",
    "SAPO",
    "SequenceSumNorm",
    "Stat",
    "Ticket",
    "TransformersEngine",
    "ValueLoss",
    "adamw_8bit",
    "concatenate",
    "dr_grpo",
    "grpo",
    "latest_checkpoint",
    "maxrl",
    "prompt_mean",
    "reinforce",
    "rloo",
    "sequence_mean",
    "token_mean",
    "warmup_then_linear",
]
