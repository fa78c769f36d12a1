"""Reinforcement learning of language models with PyTorch Lightning.

Exports are imported on first access, so that the command line starts before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_rl.version import __version__

if TYPE_CHECKING:
    from lightning_rl.advantages import (
        GAE,
        GRPO,
        OPO,
        RLOO,
        DrGRPO,
        Estimator,
        GAEOverTurns,
        MaxRL,
        Normalized,
        RawReward,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
    )
    from lightning_rl.checkpointing import AtomicCheckpointIO, FaultTolerance, latest_checkpoint
    from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
    from lightning_rl.data import PromptDataModule
    from lightning_rl.distributed import FSDP2Strategy
    from lightning_rl.environments import Conversations
    from lightning_rl.evaluation import Evaluation
    from lightning_rl.generation import (
        Engine,
        EngineError,
        FakeEngine,
        SamplingParams,
        TransformersEngine,
        VLLMEngine,
        VLLMServerEngine,
        launched_servers,
    )
    from lightning_rl.losses import (
        CISPO,
        DPPO,
        DRO,
        GMPO,
        GSPO,
        M2PO,
        SAPO,
        VESPO,
        ClipCov,
        ClippedSurrogate,
        Critic,
        KLCov,
        PolicyLoss,
        Reinforce,
        ValueLoss,
    )
    from lightning_rl.module import RLLightningModule
    from lightning_rl.optimizers import adamw_8bit, warmup_then_linear
    from lightning_rl.policy import ModelOptions
    from lightning_rl.processes.ray_pool import RayWorkers
    from lightning_rl.rewards import Rewards
    from lightning_rl.rollout import FinishReason, Rollout
    from lightning_rl.run.zero_gradient import StopOnZeroGradient
    from lightning_rl.signal.reductions import SequenceSumNorm, prompt_mean, sequence_mean, token_mean

EXPORTS = {
    "advantages": "GAE GRPO OPO RLOO DrGRPO Estimator GAEOverTurns MaxRL Normalized RawReward ReMax ReinforcePlusPlus "
    "ReinforcePlusPlusBaseline",
    "checkpointing": "AtomicCheckpointIO FaultTolerance latest_checkpoint",
    "corrections": "LossTerm LossView RLCallback Stat",
    "data": "PromptDataModule",
    "distributed": "FSDP2Strategy",
    "environments": "Conversations",
    "evaluation": "Evaluation",
    "generation": (
        "Engine EngineError FakeEngine SamplingParams TransformersEngine VLLMEngine VLLMServerEngine launched_servers"
    ),
    "losses": "CISPO DPPO DRO GMPO GSPO M2PO SAPO VESPO ClipCov ClippedSurrogate Critic KLCov PolicyLoss Reinforce "
    "ValueLoss",
    "module": "RLLightningModule",
    "optimizers": "adamw_8bit warmup_then_linear",
    "policy": "ModelOptions",
    "processes.ray_pool": "RayWorkers",
    "rewards": "Rewards",
    "rollout": "FinishReason Rollout",
    "run.zero_gradient": "StopOnZeroGradient",
    "signal.reductions": "SequenceSumNorm prompt_mean sequence_mean token_mean",
}
MODULE_OF = {name: f"lightning_rl.{module}" for module, names in EXPORTS.items() for name in names.split()}

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GAE",
    "GMPO",
    "GRPO",
    "GSPO",
    "M2PO",
    "OPO",
    "RLOO",
    "SAPO",
    "VESPO",
    "AtomicCheckpointIO",
    "ClipCov",
    "ClippedSurrogate",
    "Conversations",
    "Critic",
    "DrGRPO",
    "Engine",
    "EngineError",
    "Estimator",
    "Evaluation",
    "FSDP2Strategy",
    "FakeEngine",
    "FaultTolerance",
    "FinishReason",
    "GAEOverTurns",
    "KLCov",
    "LossTerm",
    "LossView",
    "MaxRL",
    "ModelOptions",
    "Normalized",
    "PolicyLoss",
    "PromptDataModule",
    "RLCallback",
    "RLLightningModule",
    "RawReward",
    "RayWorkers",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rewards",
    "Rollout",
    "SamplingParams",
    "SequenceSumNorm",
    "Stat",
    "StopOnZeroGradient",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "ValueLoss",
    "__version__",
    "adamw_8bit",
    "latest_checkpoint",
    "launched_servers",
    "prompt_mean",
    "sequence_mean",
    "token_mean",
    "warmup_then_linear",
]


if not TYPE_CHECKING:  # a type checker would take any name for an export

    def __getattr__(name: str) -> Any:
        """Import an export from its subpackage, or the subpackage itself (PEP 562)."""
        if name in MODULE_OF:
            value = getattr(import_module(MODULE_OF[name]), name)
        elif name in {module.partition(".")[0] for module in EXPORTS}:
            value = import_module(f"lightning_rl.{name}")
        else:
            raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}", name=name, obj=None)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF})
