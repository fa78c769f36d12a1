"""StepTrace: one optimizer step as it was made, for those who look on: outputs, gradients, parameters, figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView


@dataclass(kw_only=True)
class ParameterTrace:
    """A few entries of one parameter through a step, [N] each, on a single device.

    Attributes:
        summed: gradients of all backward passes added up, float64.
        magnitude: their sizes added up, which is what rounding goes by; None for that of ``summed``.
        passes: how many there were.
        clipped: once all passes were added up and clipped, before the optimizer was called, float64.
        gradient: what the optimizer got, float64, after the hooks before it and what it did itself.
        dtype: of the gradient; None without one.
        before: values before the step.
        after: values after it.
        held: whether the optimizer holds the parameter.
        lr: learning rate.
        options: further numbers of its parameter group, such as ``weight_decay``, ``beta1``, ``beta2``.
        state: of the optimizer before the step, by name: entries, and numbers of one element.
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
        view: its rows with what the policy said of them, detached; no rows for a microbatch of padding.
        gradient: of what was differentiated with respect to ``view.logprobs``, [b, T], times ``StepTrace.scale``.
        further: the same with respect to ``entropy`` and ``current_values``, as far as the view has them.
        parts: of the loss, this microbatch's share.
    """

    view: LossView
    gradient: Tensor
    further: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepTrace:
    """What there is to know about one optimizer step of this rank.

    Attributes:
        rollout_number: which rollout it trained on.
        step: number of the step within the rollout.
        microbatches: in their order, those of padding included.
        scale: what the loss was multiplied with before the backward: ranks, and the scale of a gradient scaler.
        norm: of the gradient before clipping, over all ranks; None for a step without a valid token.
        clipped_norm: of the gradient that the optimizer got; None on several devices.
        made: whether the optimizer moved.
        optimizer: name of its class; empty if nobody follows the parameters.
        parameters: by name; none on several devices, or if nobody asked for them.
        logged: statistics by metric, of the rollout, the step and its microbatches, as they were handed to the log.
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
        """Keeps a microbatch, and its gradient when the backward comes by."""
        outputs = {"logprobs": view.logprobs, "entropy": view.entropy, "current_values": view.current_values}
        followed = {name: output for name, output in outputs.items() if output is not None}
        gradients = {name: torch.zeros_like(output.detach()) for name, output in followed.items()}
        trace = MicrobatchTrace(
            view=view.replace(**{name: output.detach().clone() for name, output in followed.items()}),
            gradient=gradients.pop("logprobs"),
            further=gradients,
        )
        for name, output in followed.items():
            if output.requires_grad:
                output.register_hook((trace.gradient if name == "logprobs" else gradients[name]).add_)
        self.microbatches.append(trace)
        return trace

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor of rows and parameters with its name."""
        shown: list[tuple[str, Tensor]] = []
        for number, microbatch in enumerate(self.microbatches):
            kept = [*microbatch.view.tensors(), ("gradient", microbatch.gradient), *microbatch.parts.items()]
            shown += [(f"{name} of microbatch {number}", tensor) for name, tensor in kept]
        for name, entries in self.parameters.items():
            shown.append((f"the gradient of {name}", entries.summed))
        return shown

    def log(self, stats: Mapping[str, Stat]) -> None:
        """Keeps the moments of statistics that are handed to the log."""
        for name, stat in stats.items():
            self.logged.setdefault(name, []).append(stat.moments.detach().clone())
