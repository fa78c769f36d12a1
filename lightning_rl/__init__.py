"""Reinforcement learning of language models as plain PyTorch Lightning, with every signal checked."""

from lightning_rl.advantages import GAE, Estimator
from lightning_rl.data import Prompt, PromptDataModule, Ticket
from lightning_rl.generation import Completion, Engine, FakeEngine, Request, TransformersEngine
from lightning_rl.hooks import Contributions, LossTerm, LossView, RLCallback, Stat
from lightning_rl.losses import ClippedSurrogate, PolicyLoss, Reinforce
from lightning_rl.module import RLLightningModule
from lightning_rl.objective import LossParts, Objective
from lightning_rl.rollout import Finish, Rollout, concatenate
from lightning_rl.schedules import warmup_then_linear
from lightning_rl.signal.advantages import grpo, reinforce, rloo
from lightning_rl.signal.reductions import SequenceSumNorm, prompt_mean, sequence_mean, token_mean

__all__ = [
    "GAE",
    "ClippedSurrogate",
    "Completion",
    "Contributions",
    "Engine",
    "Estimator",
    "FakeEngine",
    "Finish",
    "LossParts",
    "LossTerm",
    "LossView",
    "Objective",
    "PolicyLoss",
    "Prompt",
    "PromptDataModule",
    "RLCallback",
    "RLLightningModule",
    "Reinforce",
    "Request",
    "Rollout",
    "SequenceSumNorm",
    "Stat",
    "Ticket",
    "TransformersEngine",
    "concatenate",
    "grpo",
    "prompt_mean",
    "reinforce",
    "rloo",
    "sequence_mean",
    "token_mean",
    "warmup_then_linear",
]
