"""StepTrace: outputs, gradients and metrics of one optimizer step, for observers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView


@dataclass(kw_only=True)
class MicrobatchTrace:
    """One microbatch of a step: a view of 2 rows, its gradient [2, 9], and parts {"policy": 0.1}.

    Attributes:
        view: Rows with the policy's outputs, detached; no rows for a microbatch of padding.
        gradient: Gradient of the scaled loss with respect to ``view.logprobs``, [b, T].
        further: Gradients with respect to the other outputs in ``view``, by name.
        parts: Shares of this microbatch in the parts of the loss.
        rows: Rows in the rollout, as entries of a plan.
        inputs: Inputs of the model by name, such as token ids, positions and pixels.
    """

    view: LossView
    gradient: Tensor
    further: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Sequence[int | Sequence[int]]
    inputs: Mapping[str, Tensor]


@dataclass(kw_only=True)
class StepTrace:
    """One optimizer step of this rank: step 1 of rollout 3 in two microbatches, norm 1.7, made True.

    Attributes:
        rollout_number: Number of the rollout.
        step: Number of the step within the rollout.
        microbatches: Microbatches in order, with those of padding.
        scale: Factor on the loss before the backward: number of ranks times the scale of a gradient scaler.
        norm: Gradient norm before clipping, over all ranks; None for a step without a valid token.
        made: True if the optimizer made the step.
        logged: Moments of the logged statistics by metric, of the rollout, the step and its microbatches.
    """

    rollout_number: int
    step: int
    microbatches: list[MicrobatchTrace] = field(default_factory=list)
    scale: float = 1.0
    norm: Tensor | None = None
    made: bool = False
    logged: dict[str, list[Tensor]] = field(default_factory=dict)

    def follow(
        self, view: LossView, rows: Sequence[int | Sequence[int]], inputs: Mapping[str, Tensor]
    ) -> MicrobatchTrace:
        """Add a microbatch, whose gradient is stored during the backward."""
        present = {spec.name: output for spec, output in view.outputs()}
        gradients = {name: torch.zeros_like(output.detach()) for name, output in present.items()}
        trace = MicrobatchTrace(
            view=view.replace(**{name: output.detach().clone() for name, output in present.items()}),
            gradient=gradients.pop("logprobs"),
            further=gradients,
            rows=rows,
            inputs=inputs,
        )
        for name, output in present.items():
            if output.requires_grad:
                output.register_hook((trace.gradient if name == "logprobs" else gradients[name]).add_)
        self.microbatches.append(trace)
        return trace

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of rows with its name."""
        named: list[tuple[str, Tensor]] = []
        for number, microbatch in enumerate(self.microbatches):
            tensors = [*microbatch.view.tensors(), ("gradient", microbatch.gradient), *microbatch.parts.items()]
            named += [(f"{name} of microbatch {number}", tensor) for name, tensor in tensors]
        return named

    def log(self, stats: Mapping[str, Stat]) -> None:
        """Store the moments of logged statistics."""
        for name, stat in stats.items():
            self.logged.setdefault(name, []).append(stat.moments.detach().clone())
