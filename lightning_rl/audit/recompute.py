"""A live optimizer step once more, in one piece and with the rows of all ranks in every denominator."""

import torch
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.step import StepEvidence
from lightning_rl.update import loss_view


def recompute_step(evidence: Evidence, step: StepEvidence) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The gradient that the log-probabilities of a step should have got, [b, T], and the parts of its loss.

    None for a loss that needs the other ranks' tokens.
    """
    algorithm = evidence.algorithm
    if not len(step.rows) or (algorithm.loss.prepares and len(step.masks) > 1):
        return None, {}
    leaf = step.outputs.logprobs.detach().requires_grad_()
    view = loss_view(step.rows, step.outputs._replace(logprobs=leaf), entropy_gradient=algorithm.trains_entropy)
    loss = algorithm.microbatch_loss(
        evidence.prepare(view.sanitize()), lambda reduction: step.weights_over_ranks(reduction).to(leaf.device)
    )
    if not loss.total.requires_grad:
        return torch.zeros_like(leaf), loss.parts
    (gradient,) = torch.autograd.grad(loss.total, leaf, allow_unused=True, materialize_grads=True)
    return gradient, {name: part for name, part in loss.parts.items() if name != "loss/total"}
