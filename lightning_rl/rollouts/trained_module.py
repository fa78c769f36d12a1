"""Interface of the module that rollouts train."""

from typing import Protocol

import torch
from lightning.pytorch import Trainer

from lightning_rl.data import PromptDataModule, StepIndex
from lightning_rl.distributed import Parallel
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.run_models import RunModels
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.state import RunState


class TrainedOptions(Protocol):
    """Options of the module that the log and the estimate of memory read."""

    @property
    def engine(self) -> Engine: ...  # noqa: D102

    @property
    def group_size(self) -> int: ...  # noqa: D102

    @property
    def max_staleness(self) -> int: ...  # noqa: D102

    @property
    def minibatches_per_rollout(self) -> int: ...  # noqa: D102

    @property
    def rewards(self) -> Rewards: ...  # noqa: D102

    @property
    def sampling(self) -> SamplingParams: ...  # noqa: D102


class TrainedModule(Protocol):
    """Module of a run, as far as the callbacks of the run and the estimate of its memory read it."""

    models: RunModels
    run: RunState

    @property
    def options(self) -> TrainedOptions: ...  # noqa: D102

    @property
    def trainer(self) -> Trainer: ...  # noqa: D102

    @property
    def device(self) -> torch.device: ...  # noqa: D102

    @property
    def data_module(self) -> PromptDataModule: ...  # noqa: D102

    @property
    def parallel(self) -> Parallel: ...  # noqa: D102

    @property
    def required_policy(self) -> PolicyModel: ...  # noqa: D102

    @property
    def steps_per_rollout(self) -> int: ...  # noqa: D102

    def skips(self, step_index: StepIndex) -> bool: ...  # noqa: D102
