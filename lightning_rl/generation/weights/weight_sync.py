"""WeightSync: sends the policy's weights to the engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.distributed import Parallel
from lightning_rl.generation.engine import Engine
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import persistent_buffers
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.lora import adapters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """Connection between the policy of a run and its engine.

    Args:
        engine: Engine that generates.
        policy: Policy, sharded or not.
        parallel: Strategy of the run.
        replica: Copy of the policy that the engine decodes with; None for the policy itself.
        packed: True to score the canary without padding.
        context: Context around the canary, for time and precision.
    """

    engine: Engine
    policy: PolicyModel
    parallel: Parallel
    replica: PreTrainedModel | None
    packed: bool
    context: Callable[[], AbstractContextManager[object]]

    def start(self, tokenizer: PreTrainedTokenizerBase | None, *, device: torch.device, resident: float) -> None:
        """Start the engine beside the trainer, and compare the names and shapes of the weights with its own.

        Args:
            tokenizer: Tokenizer of the policy.
            device: Device of the policy.
            resident: Bytes that the trainer holds during generation.
        """
        model = self.policy.model
        if self.replica is not None:
            nn.Module.to(self.replica, device)
        dtype = self.parallel.compute_dtype(model.dtype)
        self.engine.check_memory(model, dtype=dtype, resident=resident)
        self.engine.start(self.replica or model, tokenizer, device=self.parallel.strategy.root_device, dtype=dtype)
        self.engine.started = True
        self.engine.expect(self.weights())

    def send(self, version: int) -> None:
        """Send the weights under a version number, and check them with the engine's canary. A collective."""
        merged = bool(adapters_of(self.policy.model))  # adapters are merged in full precision
        weights = self.weights(None if merged else self.engine.dtype)
        synchronize(
            self.engine,
            weights,
            version,
            self.policy,
            dtype=self.parallel.compute_dtype(self.policy.model.dtype),
            packed=self.packed,
            context=self.context,
        )

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full value of each weight of the policy without its critic. A collective.

        Args:
            dtype: Dtype of the values; None for that of the policy.
        """
        for name, weight in self.parallel.full_parameters(self.policy, dtype=dtype):
            if name.startswith("model."):
                yield name.removeprefix("model."), weight
            del weight  # frees it before the next one is gathered
        yield from persistent_buffers(self.policy.model)
