"""Reinforcement learning of language models as plain PyTorch Lightning, with every signal checked."""

from lightning_rl.advantages import (
    GAE,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    Estimator,
    MaxRL,
    Normalized,
    RawReward,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lightning_rl.checkpointing import AtomicCheckpointIO, latest_checkpoint
from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.data import PromptDataModule
from lightning_rl.distributed import FSDP2Strategy
from lightning_rl.evaluation import Evaluation
from lightning_rl.generation import (
    Engine,
    EngineError,
    FakeEngine,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
)
from lightning_rl.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    KLCov,
    PolicyLoss,
    Reinforce,
    ValueLoss,
)
from lightning_rl.module import RLLightningModule
from lightning_rl.optimizers import adamw_8bit, warmup_then_linear
from lightning_rl.rollout import Finish, Rollout
from lightning_rl.signal.reductions import SequenceSumNorm, prompt_mean, sequence_mean, token_mean

__all__ = [
    "CISPO",
    "DPPO",
    "GAE",
    "GMPO",
    "GRPO",
    "GSPO",
    "M2PO",
    "OPO",
    "RLOO",
    "SAPO",
    "AtomicCheckpointIO",
    "ClipCov",
    "ClippedSurrogate",
    "DrGRPO",
    "Engine",
    "EngineError",
    "Estimator",
    "Evaluation",
    "FSDP2Strategy",
    "FakeEngine",
    "Finish",
    "KLCov",
    "LossTerm",
    "LossView",
    "MaxRL",
    "Normalized",
    "PolicyLoss",
    "PromptDataModule",
    "RLCallback",
    "RLLightningModule",
    "RawReward",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rollout",
    "Sampling",
    "SequenceSumNorm",
    "Stat",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "ValueLoss",
    "adamw_8bit",
    "latest_checkpoint",
    "prompt_mean",
    "sequence_mean",
    "token_mean",
    "warmup_then_linear",
]
