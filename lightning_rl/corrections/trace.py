"""StepTrace: outputs, gradients, parameters and metrics of one optimizer step, for observers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView


@dataclass(kw_only=True)
class ParameterTrace:
    """Sampled entries of one parameter through a step, [N] each, on a single device.

    Attributes:
        summed: Sum of the gradients of all backward passes, float64.
        magnitude: Sum of their absolute values, for rounding bounds; None for that of ``summed``.
        passes: Number of backward passes.
        clipped: Gradient after clipping, before the optimizer step, float64.
        gradient: Gradient that the optimizer used, after its step hooks, float64.
        dtype: Dtype of the gradient; None without one.
        before: Values before the step.
        after: Values after the step.
        held: True if the optimizer contains the parameter.
        lr: Learning rate.
        options: Numeric options of its parameter group, such as ``weight_decay``, ``beta1``, ``beta2``.
        state: Optimizer state before the step by name: entries, and scalars.
    """

    summed: Tensor
    magnitude: Tensor | None = None
    passes: int = 0
    clipped: Tensor | None = None
    gradient: Tensor | None = None
    dtype: torch.dtype | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    held: bool = True
    lr: float = 0.0
    options: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class MicrobatchTrace:
    """One microbatch of a step.

    Attributes:
        view: Rows with the policy's outputs, detached; no rows for a microbatch of padding.
        gradient: Gradient of the scaled loss with respect to ``view.logprobs``, [b, T].
        further: Gradients with respect to ``entropy`` and ``current_values``, if the view has them.
        parts: Shares of this microbatch in the parts of the loss.
    """

    view: LossView
    gradient: Tensor
    further: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepTrace:
    """One optimizer step of this rank.

    Attributes:
        rollout_number: Number of the rollout.
        step: Number of the step within the rollout.
        microbatches: Microbatches in order, with those of padding.
        scale: Factor on the loss before the backward: number of ranks times the scale of a gradient scaler.
        norm: Gradient norm before clipping, over all ranks; None for a step without a valid token.
        clipped_norm: Norm of the gradient that the optimizer used; None on several devices.
        made: True if the optimizer made the step.
        optimizer: Name of its class; empty if parameters are not traced.
        parameters: Parameter traces by name; empty on several devices, or if not requested.
        logged: Moments of the logged statistics by metric, of the rollout, the step and its microbatches.
    """

    rollout_number: int
    step: int
    microbatches: list[MicrobatchTrace] = field(default_factory=list)
    scale: float = 1.0
    norm: Tensor | None = None
    clipped_norm: float | None = None
    made: bool = False
    optimizer: str = ""
    parameters: dict[str, ParameterTrace] = field(default_factory=dict)
    logged: dict[str, list[Tensor]] = field(default_factory=dict)

    def follow(self, view: LossView) -> MicrobatchTrace:
        """Add a microbatch, whose gradient is stored during the backward."""
        outputs = {"logprobs": view.logprobs, "entropy": view.entropy, "current_values": view.current_values}
        present = {name: output for name, output in outputs.items() if output is not None}
        gradients = {name: torch.zeros_like(output.detach()) for name, output in present.items()}
        trace = MicrobatchTrace(
            view=view.replace(**{name: output.detach().clone() for name, output in present.items()}),
            gradient=gradients.pop("logprobs"),
            further=gradients,
        )
        for name, output in present.items():
            if output.requires_grad:
                output.register_hook((trace.gradient if name == "logprobs" else gradients[name]).add_)
        self.microbatches.append(trace)
        return trace

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of rows and parameters with its name."""
        named: list[tuple[str, Tensor]] = []
        for number, microbatch in enumerate(self.microbatches):
            tensors = [*microbatch.view.tensors(), ("gradient", microbatch.gradient), *microbatch.parts.items()]
            named += [(f"{name} of microbatch {number}", tensor) for name, tensor in tensors]
        for name, entries in self.parameters.items():
            named.append((f"the gradient of {name}", entries.summed))
        return named

    def log(self, stats: Mapping[str, Stat]) -> None:
        """Store the moments of logged statistics."""
        for name, stat in stats.items():
            self.logged.setdefault(name, []).append(stat.moments.detach().clone())
