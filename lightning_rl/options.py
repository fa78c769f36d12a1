"""Options: the arguments of the module after resolution."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.advantages import Estimator
from lightning_rl.environments import Conversations
from lightning_rl.evaluation import Evaluation
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.losses import Critic, PolicyLoss
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder
from lightning_rl.policy import ModelOptions
from lightning_rl.policy.build import ModelSource
from lightning_rl.rewards import Rewards
from lightning_rl.signal.reductions import Reduction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options(Mapping[str, Any]):
    """Arguments of :class:`RLLightningModule` after resolution, such as ``ClippedSurrogate()`` for ``loss="ppo"``.

    Also a mapping from the name of each argument to its value.
    """

    policy: ModelSource
    rewards: Rewards
    advantages: Estimator
    loss: PolicyLoss
    reduction: Reduction
    reference: ModelSource | None
    critic: Critic | None
    tokenizer: PreTrainedTokenizerBase | None
    engine: Engine
    sampling: SamplingParams
    environment: Conversations | None
    evaluation: Evaluation | Sequence[Evaluation]
    group_size: int
    minibatches_per_rollout: int
    epochs_per_rollout: int
    max_staleness: int
    mismatch_every_n_rollouts: int
    optimizer: OptimizerBuilder
    lr_scheduler: SchedulerBuilder | None
    max_grad_norm: float | None
    model: ModelOptions
    seed: int

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches_per_rollout * self.epochs_per_rollout

    @override
    def __getitem__(self, name: str) -> Any:
        if name not in self.__slots__:
            raise KeyError(name)
        return getattr(self, name)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.__slots__)

    @override
    def __len__(self) -> int:
        return len(self.__slots__)
