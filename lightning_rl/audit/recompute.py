"""A live optimizer step once more, in one piece and with the rows of all ranks in every denominator."""

import torch
from torch import Tensor

from lightning_rl import distributed
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.trace import LiveStep
from lightning_rl.signal.masked import own_sum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.update import view_of


def redone(evidence: Evidence, step: LiveStep) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The gradient that the log-probabilities of a step should have got, [b, T], and the parts of its loss.

    None for a loss that needs the other ranks' tokens.
    """
    subject = evidence.subject
    if not len(step.rows) or (subject.loss.prepares and len(step.everyone) > 1):
        return None, {}
    leaf = step.outputs.logprobs.detach().requires_grad_()
    objective = subject.objective()
    view = view_of(step.rows, step.outputs._replace(logprobs=leaf), entropy_gradient=objective.entropy_gradient)
    view = evidence.prepared(view.sanitize())
    with distributed.alone():
        loss = objective(view, lambda reduction: weights_of_all(step, reduction).to(leaf.device))
    if not loss.total.requires_grad:
        return torch.zeros_like(leaf), loss.parts
    (gradient,) = torch.autograd.grad(loss.total, leaf, allow_unused=True, materialize_grads=True)
    return gradient, {name: part for name, part in loss.parts.items() if name != "loss/total"}


def weights_of_all(step: LiveStep, reduction: Reduction) -> Tensor:
    """The weights of this rank's tokens, from a reduction of the rows of all ranks at once, shape [b, T]."""
    width = max(valid.shape[1] for valid, _, _ in step.everyone)
    parts = [torch.nn.functional.pad(valid, (0, width - valid.shape[1])) for valid, _, _ in step.everyone]
    trained, groups = (torch.cat([known[place] for known in step.everyone]) for place in (1, 2))
    weights = reduction(torch.cat(parts), trained, groups, own_sum)
    begin = sum(len(part) for part in parts[: step.rank])
    return weights[begin : begin + len(step.rows), : step.rows.width]
