"""Rerun: repeat one recorded optimizer step with the policy, up to its gradient."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Microbatch, Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.recording.recompute import load_states
from lightning_rl.recording.recording import Recording
from lightning_rl.update import accumulate_gradient


@dataclass(frozen=True, slots=True)
class Rerun:
    """Result of a recorded step with the weights of a starting fit.

    Attributes:
        weights: Hash of the weights.
        step: Number of the recorded step that started from these weights; None (and all else empty) if there is none.
        logprobs: Log-probabilities of the rows that the step trained, [B, T], 0 elsewhere.
        entropy: Entropy of these rows, [B, T], 0 elsewhere.
        norm: Gradient norm over all ranks before clipping.
    """

    weights: str
    step: int | None = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    norm: Tensor | None = None


def rerun_step(module: RLLightningModule, recording: Recording) -> Rerun:
    """Find the recorded step that started from a module's weights and repeat it without changing the module.

    A collective call during a fit; each rank passes its own recording.
    """
    policy, parallel, steps = module.required_policy, module.parallel, recording.header["steps"]
    weights = fingerprint(parallel.full_parameters(policy))
    number = next((number for number, step in enumerate(steps) if step["weights"] == weights), None)
    if number is None:
        return Rerun(weights)
    rollout, algorithm = recording.rollout, module.algorithm
    plan = plan_of_rows(rollout, recording.header["plan"], packed=module.models.options.packing).to(module.device)
    logprobs = torch.zeros_like(cast(Tensor, recording.of_step(number, "logprobs")))
    entropy = torch.zeros_like(logprobs)

    def forward(microbatch: Microbatch) -> Outputs:
        outputs = policy(microbatch.layout)
        microbatch.write(logprobs, outputs.logprobs.detach())
        microbatch.write(entropy, outputs.entropy.detach())
        return outputs

    load_states(algorithm, steps[number]["states"] or {})
    accumulate_gradient(
        rollout.to(module.device),
        plan.step(number),
        forward,
        algorithm,
        backward=lambda loss: module.manual_backward(loss * parallel.ranks),
        around=lambda last: parallel.accumulating(policy, last=last),
        collectives=parallel.collectives,
    )
    parallel.complete_gradient(policy)
    norm = parallel.clipped_norm(policy, torch.inf).detach()
    return Rerun(weights, number, logprobs, entropy, norm)
