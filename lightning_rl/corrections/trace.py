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
        summed: gradients of all backward passes added up.
        gradient: what the optimizer got.
        before: values before the step.
        after: values after it.
        lr: learning rate; 0 if no optimizer holds the parameter.
    """

    summed: Tensor
    gradient: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    lr: float = 0.0


@dataclass(kw_only=True)
class MicrobatchTrace:
    """One microbatch of a step.

    Attributes:
        view: its rows with what the policy said of them, detached; no rows for a microbatch of padding.
        gradient: of what was differentiated with respect to ``view.logprobs``, [b, T], times ``StepTrace.scale``.
        parts: of the loss, this microbatch's share.
    """

    view: LossView
    gradient: Tensor
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
    parameters: dict[str, ParameterTrace] = field(default_factory=dict)
    logged: dict[str, list[Tensor]] = field(default_factory=dict)

    def follow(self, view: LossView) -> MicrobatchTrace:
        """Keeps a microbatch, and its gradient when the backward comes by."""
        values = None if view.current_values is None else view.current_values.detach().clone()
        copies = {"logprobs": view.logprobs.detach().clone(), "entropy": view.entropy.detach().clone()}
        trace = MicrobatchTrace(
            view=view.replace(**copies, current_values=values), gradient=torch.zeros_like(copies["logprobs"])
        )

        def add(gradient: Tensor) -> None:
            trace.gradient.add_(gradient)

        if view.logprobs.requires_grad:
            view.logprobs.register_hook(add)
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
