"""WeightSync: sends the policy's weights to the engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_rl.distributed import Parallel, check_process_group
from lightning_rl.generation.engine import Engine
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import persistent_buffers
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.lora import adapters_of
from lightning_rl.policy.memory import resident_bytes
from lightning_rl.policy.run_models import RunModels


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """Connection between the policy of a run and its engine.

    Args:
        engine: Engine that generates.
        policy: Policy, sharded or not.
        models: Replica that the engine decodes with, if there is one, and reference.
        parallel: Strategy of the run.
        phase: Context that shows and measures a phase, for the canary.
    """

    engine: Engine
    policy: PolicyModel
    models: RunModels
    parallel: Parallel
    phase: Callable[[str], AbstractContextManager[object]]

    def start(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Start the engine beside the trainer, and compare the names and shapes of the weights with its own.

        Args:
            tokenizer: Tokenizer of the policy.
        """
        check_process_group(int(getattr(self.parallel.strategy, "world_size", 1)))
        model, replica = self.policy.model, self.models.replica
        if replica is not None:
            nn.Module.to(replica, model.device)
        dtype = self.parallel.compute_dtype(model.dtype)
        self.engine.check_memory(model, dtype=dtype, resident=self.resident)
        self.engine.start(replica or model, tokenizer, device=self.parallel.strategy.root_device, dtype=dtype)
        self.engine.started = True
        self.engine.expect(self.weights())

    @property
    def resident(self) -> float:
        """Bytes that this rank holds during generation, optimizer states included."""
        copies, optimizer = self.parallel.copies_gradients, self.parallel.optimizer
        return resident_bytes(self.policy, self.models.reference, optimizer, copies_gradients=copies)

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
            packed=self.models.options.packing,
            context=self._canary_context,
            processor=self.models.processor,
        )

    @contextmanager
    def _canary_context(self) -> Iterator[None]:
        """Return the context of the canary, for its time and precision."""
        with self.phase("canary"), self.parallel.strategy.precision_plugin.forward_context():
            yield

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
