"""Rollout recorder: save rollouts with everything that it takes to compute their signal, loss and gradient again.

It takes no part in the signal: with and without it the weights are bitwise the same. ``lightning-rl replay`` reads what
it wrote, on any machine and without the model.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.corrections import LossView, RLCallback
from lightning_rl.data import Ticket
from lightning_rl.metrics import callbacks_of
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.fingerprint import fingerprint
from lightning_rl.recording.configuration import Configuration
from lightning_rl.recording.recording import Recording
from lightning_rl.recording.serialize import described
from lightning_rl.rollout import Finish, Rollout

PACKAGES = ("lightning-rl", "torch", "lightning", "transformers")
OPTIONS = (
    "group_size", "minibatches", "epochs", "temperature", "keep", "max_new_tokens", "eos_token_ids", "stop",
    "token_budget", "packing", "activation_checkpointing", "max_staleness", "max_grad_norm", "seed",
)  # fmt: skip


class RolloutRecorder(RLCallback):
    """Records the rollouts 0, n, 2n, ... of this rank when their last optimizer step is made, or the run ends.

    A recorded step costs a hash of all weights and a copy of [B, T] tensors to the CPU. A rollout that a run resumes in
    the middle of is not recorded.

    Args:
        folder: where the files go.
        every_n_rollouts: how often.
        keep: how many recordings are kept, the newest; None for all.

    Raises:
        ValueError: if a number is below 1.
    """

    name = "rollout_recorder"

    def __init__(self, folder: str | Path, every_n_rollouts: int = 1, *, keep: int | None = None) -> None:
        if every_n_rollouts < 1 or (keep is not None and keep < 1):
            raise ValueError(f"expected every_n_rollouts >= 1 and keep >= 1 or None, got {every_n_rollouts} and {keep}")
        self.folder = Path(folder)
        self.every_n_rollouts = every_n_rollouts
        self.keep = keep
        self.written: list[Path] = []
        self._open: _Open | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Ticket, batch_idx: int) -> None:
        module = cast(RLLightningModule, pl_module)
        if batch.step == 0:
            self._open = _Open(module, batch.cycle) if batch.cycle % self.every_n_rollouts == 0 else None
        if self._open is not None:
            self._open.begin_step(batch)

    @override
    def observe_drawn(self, rollout: Rollout) -> None:
        if self._open is not None:
            self._open.scored.update(zip(rollout.sample_ids.tolist(), rollout.rewarded.tolist(), strict=True))

    @override
    def observe(self, rollout: Rollout) -> None:
        if self._open is not None:
            self._open.rollout = rollout

    @override
    def observe_update(self, view: LossView) -> None:
        if self._open is not None:
            self._open.keep(view)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Ticket, batch_idx: int
    ) -> None:
        if self._open is None:
            return
        self._open.end_step(outputs if isinstance(outputs, Mapping) else {})
        if batch.step == self._open.module.steps_per_rollout - 1:
            self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write()

    def _write(self) -> None:
        own, self._open = self._open, None
        if own is None or own.rollout is None or not own.tensors or not distributed.draws():
            return  # of the processes that work on the same rows one is enough
        self.written.append(own.recording().save(self.folder))
        while self.keep is not None and len(self.written) > self.keep:
            oldest = self.written.pop(0)
            oldest.unlink(missing_ok=True)
            oldest.with_suffix(".safetensors").unlink(missing_ok=True)


class _Open:
    """A recording that is being made."""

    def __init__(self, module: RLLightningModule, cycle: int) -> None:
        trainer = module.trainer
        self.module, self.cycle = module, cycle
        self.configuration = Configuration.of(module, callbacks_of(trainer))
        self.header = {
            "cycle": cycle,
            "rank": module.parallel.rank,
            "world_size": module.parallel.ranks,
            "device": module.device.type,
            "precision": str(trainer.precision),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "options": {name: described(getattr(module, name)) for name in OPTIONS},
            "callbacks": [type(callback).__name__ for callback in callbacks_of(trainer)],
            "configuration": self.configuration.described(),
            "states": self._states(),
        }
        self.scored: dict[int, bool] = {}
        self.rollout: Rollout | None = None
        self.plan: list[list[list[int]]] = []
        self.steps: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}

    def _states(self) -> dict[str, Any]:
        return {one.name: described(one.state_dict()) for one in self.configuration.callbacks if one.state_dict()}

    def begin_step(self, ticket: Ticket) -> None:
        """Notes what the weights are before a step."""
        weights = fingerprint(self.module.parallel.full_parameters(self.module.required_policy))
        empty = {"states": None, "scale": 1.0, "parts": {}, "grad_norm": None, "made": False}
        self.steps.append({"ticket": ticket.index, "weights": weights, **empty})

    def keep(self, view: LossView) -> None:
        """Takes a microbatch's outputs now and its gradient when the backward comes by."""
        held, step = self.module.run.held, self.steps[-1]
        if held is None or self.rollout is None:
            return
        if step["states"] is None:
            scaler = getattr(self.module.trainer.precision_plugin, "scaler", None)  # under 16-mixed
            scale = self.module.parallel.ranks * (1.0 if scaler is None else float(scaler.get_scale()))
            step |= {"states": self._states(), "scale": scale}
            self.plan = held.plan.rows()
        if not view.real.any():
            return
        prefix = f"pass/{(len(self.steps) - 1) // self.module.minibatches}"
        rows = (view.sample_ids[:, None] == self.rollout.sample_ids).int().argmax(-1)
        self._put(f"{prefix}/logprobs", rows, view.logprobs)
        self._put(f"{prefix}/entropy", rows, view.entropy)
        self._put(f"{prefix}/gradient", rows, torch.zeros_like(view.logprobs))
        if view.current_values is not None:
            self._put(f"{prefix}/values", rows, view.current_values)
        if view.logprobs.requires_grad:
            view.logprobs.register_hook(lambda gradient: self._put(f"{prefix}/gradient", rows, gradient))

    def _put(self, name: str, rows: Tensor, values: Tensor) -> None:
        shape = cast(Rollout, self.rollout).response_ids.shape
        kept = self.tensors.setdefault(name, torch.zeros(shape, dtype=values.dtype))
        kept[rows.cpu(), : values.shape[1]] = values.detach().cpu()

    def end_step(self, outputs: Mapping[str, Tensor]) -> None:
        """Notes this rank's share of the loss, and the gradient norm of all ranks before clipping."""
        figures = {name: described(float(value)) for name, value in outputs.items() if value.numel() == 1}
        norm = outputs.get("optim/grad_norm")
        parts = {name: value for name, value in figures.items() if name != "optim/grad_norm"}
        self.steps[-1] |= {"parts": parts, "grad_norm": figures.get("optim/grad_norm")}
        self.steps[-1] |= {"made": norm is not None and bool(torch.isfinite(norm))}

    def recording(self) -> Recording:
        """All of it; steps that the run did not come to are missing."""
        rollout = cast(Rollout, self.rollout).to("cpu")
        scored = torch.tensor([self.scored[sample] for sample in rollout.sample_ids.tolist()], dtype=torch.bool)
        tensors = {f"rollout/{name}": tensor for name, tensor in rollout.tensors()}
        return Recording(
            header={**self.header, "plan": self.plan, "steps": self.steps, "samples": self._samples(rollout)},
            tensors={**tensors, "drawn/scored": scored, **self.tensors},
        )

    def _samples(self, rollout: Rollout) -> list[dict[str, Any]]:
        tokenizer = self.module.tokenizer

        def text(ids: Tensor) -> Any:
            return ids.tolist() if tokenizer is None else tokenizer.decode(ids.tolist())

        return [
            {
                "sample": int(rollout.sample_ids[row]),
                "group": int(rollout.groups[row]),
                "finish": Finish(int(rollout.finish[row])).name.lower(),
                "reward": described(float(rollout.rewards[row])),
                "prompt": text(rollout.prompt_ids[row, : rollout.prompt_lengths[row]]),
                "response": text(rollout.response_ids[row, : rollout.response_lengths[row]]),
            }
            for row in range(len(rollout))
        ]
