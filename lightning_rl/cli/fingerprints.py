"""Fingerprints: hashes of everything that has to be equal after each optimizer step of two equal runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.fingerprint import fingerprint
from lightning_rl.rollout import Rollout

KINDS = ("prompts", "rollout", "metrics", "weights", "optimizer")  # in the order in which they come to be


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One hash for each of :data:`KINDS`, and the metrics themselves."""

    hashes: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)


class Fingerprints(RLCallback):
    """Takes them on this rank, by number of the ticket, and changes nothing."""

    name = "fingerprints"

    def __init__(self) -> None:
        self.taken: dict[int, Fingerprint] = {}
        self._rollout = {"prompts": "", "rollout": ""}

    @override
    def observe(self, rollout: Rollout) -> None:
        prompts = [("prompt_ids", rollout.prompt_ids), ("sample_ids", rollout.sample_ids)]
        self._rollout = {"prompts": fingerprint(prompts), "rollout": fingerprint(rollout.tensors())}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        current = cast(RLLightningModule, pl_module).run.current
        if current is not None:
            self.observe(current.rollout)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast(RLLightningModule, pl_module)
        metrics = {
            name: value
            for name, value in module.run.metrics.values().items()
            if not name.startswith("time/") and name != "tokens_per_second"
        }
        own = {
            "metrics": fingerprint((name, torch.tensor(value, dtype=torch.float64)) for name, value in metrics.items()),
            "weights": fingerprint(module.parallel.full_parameters(module.required_policy)),
            "optimizer": fingerprint(_states(trainer.optimizers)),
        }
        self.taken[batch.index] = Fingerprint({**self._rollout, **own}, metrics)


def _states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """States in the order of the parameters; that of the dictionaries is another after loading."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield f"{number}/{key}", value
