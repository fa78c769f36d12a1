"""Evidence of one optimizer step, from its trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_rl.audit.parameter_tracer import ParameterTrace
from lightning_rl.audit.rates import Stepping
from lightning_rl.corrections import Stat, StepTrace
from lightning_rl.distributed import Collectives
from lightning_rl.policy import Outputs
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction


class RecomputedStep(NamedTuple):
    """An optimizer step recomputed in one piece from the finished rollout.

    Attributes:
        gradient: Gradient of the log-probabilities, [b, T].
        further: Gradients of the other outputs in a view, by name, if they are trained.
        parts: Parts of the loss.
    """

    gradient: Tensor
    further: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]


@dataclass(kw_only=True)
class StepEvidence:
    """Evidence of one optimizer step.

    Attributes:
        number: Number of the step in its rollout.
        rows: Rows of this rank in this step, from the finished rollout.
        outputs: Outputs of the policy on the rows.
        gradient: Gradient of the loss with respect to the log-probabilities, [b, T].
        further: Gradients with respect to the other outputs in a view, by name, if they are trained.
        planned: Sample ids that the plan contains for this step.
        passes: Sample ids of every step so far, by number of the step.
        masks: ``valid_tokens``, ``trained`` and ``groups`` of the rows of each rank in this step.
        rank: Rank of these rows in ``masks``.
        weights: Weights of the tokens by the run's reduction with its sums over ranks, [b, T]; None if unknown.
        recomputed: The step recomputed in one piece; None if unknown.
        unknown: Reason why it or the logged metrics are unknown.
        norm: Norm of the gradient that the optimizer got; None on several devices.
        unclipped_norm: Norm before the hooks before the optimizer step, and before clipping; likewise.
        parameters: Traces by name; empty on several devices.
        optimizer: Name of the optimizer's class; empty on several devices.
        blamed: Culprits outside of the core that changed, or could have changed, ``gradients``, ``weights``,
            ``optimizer``, ``metrics``, ``backward`` or ``plan``.
        stepping: State of the optimizer.
        silent: Names of parameters without a backward pass on which the policy's outputs depend.
        frozen: Names of parameters that no longer require a gradient.
        scheduler_steps: Number of scheduler steps; None without a scheduler.
        logged: Moments by metric, of the rollout, the step and its microbatches.
        figures: Expected metrics of this rollout and step.
        row: Values in the loggers and in Lightning, by place and metric.
        row_figures: Expected values; empty if nothing was logged, or if the row spans steps that were not audited.
        missing: Metrics that were logged and are not in the row.
    """

    rows: Rollout
    outputs: Outputs
    gradient: Tensor
    masks: Sequence[tuple[Tensor, ...]]
    number: int = 0
    rank: int = 0
    further: Mapping[str, Tensor] = field(default_factory=dict)
    planned: Tensor | None = None
    passes: Mapping[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    recomputed: RecomputedStep | None = None
    unknown: str = ""
    norm: float | None = None
    unclipped_norm: float | None = None
    parameters: Mapping[str, ParameterTrace] = field(default_factory=dict)
    optimizer: str = ""
    blamed: Mapping[str, str] = field(default_factory=dict)
    stepping: Stepping = field(default_factory=Stepping)
    silent: Sequence[str] = ()
    frozen: Sequence[str] = ()
    scheduler_steps: int | None = None
    logged: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    figures: Mapping[str, Stat] = field(default_factory=dict)
    row: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    row_figures: Mapping[str, Stat] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @staticmethod
    def of(
        trace: StepTrace, rollout: Rollout, reduction: Reduction, collectives: Collectives, rank: int
    ) -> "StepEvidence":
        """Return the evidence of a traced step on a finished rollout. A collective."""
        microbatches = [microbatch for microbatch in trace.microbatches if microbatch.view.real.any()]
        views = [microbatch.view for microbatch in microbatches]
        ids = torch.cat([view.sample_ids for view in views]) if views else rollout.sample_ids[:0]
        first = (ids[:, None] == ids).int().argmax(-1) if len(ids) else ids  # a row may have parts in several views
        distinct = first == torch.arange(len(ids), device=ids.device)
        place = (distinct.cumsum(0) - 1)[first]
        rows = rollout.select(
            (ids[distinct][:, None] == rollout.sample_ids).int().argmax(-1),
            width=max((view.width for view in views), default=None),
        )

        def join(parts: Sequence[Tensor]) -> Tensor:
            padded = [pad(part, (0, rows.width - part.shape[1])) for part in parts]
            if not padded:
                return torch.zeros(rows.valid_tokens.shape)
            return padded[0].new_zeros(len(rows), rows.width).index_add_(0, place, torch.cat(padded))

        outputs: dict[str, list[Tensor]] = {"logprobs": [], "entropy": []}
        for spec, output in (named for view in views for named in view.outputs()):
            outputs.setdefault(spec.output, []).append(output)
        masks = (rows.valid_tokens, rows.trained, rows.groups)
        return StepEvidence(
            rows=rows,
            outputs=Outputs(**{name: join(parts) for name, parts in outputs.items()}),
            gradient=join([microbatch.gradient / trace.scale for microbatch in microbatches]),
            further={
                name: join([microbatch.further[name] / trace.scale for microbatch in microbatches])
                for name in (microbatches[0].further if microbatches else ())
            },
            number=trace.step,
            masks=collectives.objects(tuple(mask.cpu() for mask in masks)),
            rank=rank,
            weights=reduction(*masks, collectives.sum),
            logged=trace.logged,
        )

    def weights_over_ranks(self, reduction: Reduction) -> Tensor:
        """Return the weights of this rank's tokens by a reduction over the rows of all ranks, [b, T]."""
        width = max(valid.shape[1] for valid, _, _ in self.masks)
        valid = [pad(valid, (0, width - valid.shape[1])) for valid, _, _ in self.masks]
        trained, groups = (torch.cat([masks[place] for masks in self.masks]) for place in (1, 2))
        weights = reduction(torch.cat(valid), trained, groups, local_sum)
        begin = sum(map(len, valid[: self.rank]))
        return weights[begin : begin + len(self.rows), : self.rows.width]
