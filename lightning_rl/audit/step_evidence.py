"""StepResult: what the checks look at of one optimizer step, from its trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_rl.audit.rates import Stepping
from lightning_rl.corrections import ParameterTrace, StepTrace
from lightning_rl.distributed import Collectives
from lightning_rl.policy import Outputs
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction


class RecomputedStep(NamedTuple):
    """An optimizer step once more, in one piece and from the finished rollout.

    Attributes:
        gradient: with respect to the log-probabilities, [b, T].
        further: with respect to ``entropy`` and ``current_values``, as far as something trains them.
        parts: of the loss.
    """

    gradient: Tensor
    further: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]


@dataclass(kw_only=True)
class StepEvidence:
    """What was seen of one optimizer step.

    Attributes:
        number: of the step in its rollout.
        rows: that this rank trained on in this step, from the finished rollout.
        outputs: what the policy said of them.
        gradient: of the loss with respect to their log-probabilities, [b, T].
        further: the same with respect to ``entropy`` and ``current_values``, as far as they were trained.
        planned: identities of the rows that the plan has for this step.
        passes: identities of the rows of every step so far that was seen, by number of the step.
        masks: ``valid_tokens``, ``trained`` and ``groups`` of the rows of each rank in this step.
        rank: of these rows in ``masks``.
        weights: of the rows' tokens by the run's reduction with its sums over ranks, [b, T]; None if unknown.
        recomputed: the step once more in one piece; None if unknown.
        norm: of the gradient that the optimizer got; None on several devices.
        parameters: by name; none on several devices.
        optimizer: name of its class; empty on several devices.
        blamed: who changed, or could have changed, ``gradients``, ``weights``, ``optimizer``, ``metrics`` or the
            ``backward``, ``plan`` from outside of the core, as culprits.
        stepping: how the optimizer steps.
        silent: names of parameters that no backward pass reached, though what the policy says depends on them.
        frozen: names of parameters that were trained when the fit began, and now need no gradient.
        scheduler_steps: how often the scheduler stepped; None without one.
        logged: moments by metric, of the rollout, the step and its microbatches.
        figures: what the metrics should be, of this rollout and step: moments and name of the reduction.
        row: what reached the loggers and Lightning, by place and metric.
        row_figures: what that should be; empty if nothing was logged, or if it spans what was not audited.
        missing: metrics that were handed to the log and are not in the row.
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
    norm: float | None = None
    parameters: Mapping[str, ParameterTrace] = field(default_factory=dict)
    optimizer: str = ""
    blamed: Mapping[str, str] = field(default_factory=dict)
    stepping: Stepping = field(default_factory=Stepping)
    silent: Sequence[str] = ()
    frozen: Sequence[str] = ()
    scheduler_steps: int | None = None
    logged: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    figures: Mapping[str, tuple[Tensor, str]] = field(default_factory=dict)
    row: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    row_figures: Mapping[str, tuple[Tensor, str]] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @staticmethod
    def of(
        trace: StepTrace, rollout: Rollout, reduction: Reduction, collectives: Collectives, rank: int
    ) -> "StepEvidence":
        """That of a traced step on a finished rollout. A collective."""
        microbatches = [microbatch for microbatch in trace.microbatches if microbatch.view.real.any()]
        views = [microbatch.view for microbatch in microbatches]
        ids = torch.cat([view.sample_ids for view in views]) if views else rollout.sample_ids[:0]
        rows = rollout.select(
            (ids[:, None] == rollout.sample_ids).int().argmax(-1),
            width=max((view.width for view in views), default=None),
        )

        def join(parts: Sequence[Tensor]) -> Tensor:
            padded = [pad(part, (0, rows.width - part.shape[1])) for part in parts]
            return torch.cat(padded) if padded else torch.zeros(rows.valid_tokens.shape)

        values = [view.current_values for view in views if view.current_values is not None]
        masks = (rows.valid_tokens, rows.trained, rows.groups)
        return StepEvidence(
            rows=rows,
            outputs=Outputs(
                join([view.logprobs for view in views]),
                join([view.entropy for view in views]),
                join(values) if values else None,
            ),
            gradient=join([microbatch.gradient / trace.scale for microbatch in microbatches]),
            further={
                name: join([microbatch.further[name] / trace.scale for microbatch in microbatches])
                for name in (microbatches[0].further if microbatches else ())
            },
            number=trace.step,
            optimizer=trace.optimizer,
            masks=collectives.objects(tuple(mask.cpu() for mask in masks)),
            rank=rank,
            weights=reduction(*masks, collectives.sum),
            norm=trace.clipped_norm,
            parameters=trace.parameters,
            logged=trace.logged,
        )

    def weights_over_ranks(self, reduction: Reduction) -> Tensor:
        """The weights of this rank's tokens, from a reduction of the rows of all ranks at once, shape [b, T]."""
        width = max(valid.shape[1] for valid, _, _ in self.masks)
        valid = [pad(valid, (0, width - valid.shape[1])) for valid, _, _ in self.masks]
        trained, groups = (torch.cat([masks[place] for masks in self.masks]) for place in (1, 2))
        weights = reduction(torch.cat(valid), trained, groups, local_sum)
        begin = sum(map(len, valid[: self.rank]))
        return weights[begin : begin + len(self.rows), : self.rows.width]
