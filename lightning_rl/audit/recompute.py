"""A live optimizer step once more, in one piece and with the rows of all ranks in every denominator."""

import torch
from torch import Tensor

from lightning_rl import distributed
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.trace import StepEvidence
from lightning_rl.signal.masked import own_sum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.update import view_of


def recompute_step(evidence: Evidence, step: StepEvidence) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The gradient that the log-probabilities of a step should have got, [b, T], and the parts of its loss.

    None for a loss that needs the other ranks' tokens.
    """
    algorithm = evidence.algorithm
    if not len(step.rows) or (algorithm.loss.prepares and len(step.masks) > 1):
        return None, {}
    leaf, objective = step.outputs.logprobs.detach().requires_grad_(), algorithm.objective()
    view = view_of(step.rows, step.outputs._replace(logprobs=leaf), entropy_gradient=objective.entropy_gradient)
    with distributed.alone():
        loss = objective(
            evidence.prepare(view.sanitised()),
            lambda reduction: weights_over_ranks(step, reduction).to(leaf.device),
        )
    if not loss.total.requires_grad:
        return torch.zeros_like(leaf), loss.parts
    (gradient,) = torch.autograd.grad(loss.total, leaf, allow_unused=True, materialize_grads=True)
    return gradient, {name: part for name, part in loss.parts.items() if name != "loss/total"}


def weights_over_ranks(step: StepEvidence, reduction: Reduction) -> Tensor:
    """The weights of this rank's tokens, from a reduction of the rows of all ranks at once, shape [b, T]."""
    width = max(valid.shape[1] for valid, _, _ in step.masks)
    valid = [torch.nn.functional.pad(valid, (0, width - valid.shape[1])) for valid, _, _ in step.masks]
    trained, groups = (torch.cat([masks[place] for masks in step.masks]) for place in (1, 2))
    weights = reduction(torch.cat(valid), trained, groups, own_sum)
    begin = sum(len(part) for part in valid[: step.rank])
    return weights[begin : begin + len(step.rows), : step.rows.width]
