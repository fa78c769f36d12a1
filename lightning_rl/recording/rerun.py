"""Rescored: one optimizer step of a recording repeated by the policy itself, up to its gradient."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_rl import distributed
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Layout, Outputs, PolicyModel
from lightning_rl.policy.fingerprint import fingerprint
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.recording.configuration import Configuration
from lightning_rl.recording.recording import Recording
from lightning_rl.recording.serialize import rebuilt
from lightning_rl.update import accumulated


@dataclass(frozen=True, slots=True)
class Rescored:
    """What the weights of a fit that is about to begin make of a recorded step.

    Attributes:
        weights: their hash.
        step: number of the recorded step that began with them; None if none did, and then there is nothing else.
        logprobs: of the rows that the step trained, [B, T], 0 elsewhere.
        entropy: the same.
        norm: of the gradient with respect to the parameters, over all ranks, before clipping.
    """

    weights: str
    step: int | None = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    norm: Tensor | None = None


def rescored(module: RLLightningModule, recording: Recording) -> Rescored:
    """Finds the recorded step that began with the weights of a module and repeats it; the module does not move.

    Args:
        module: of a Trainer that is fitting, on every rank.
        recording: of this rank.
    """
    policy, steps = module.required_policy, recording.header["steps"]
    weights = fingerprint(module.parallel.full_parameters(policy))
    number = next((number for number, step in enumerate(steps) if step["weights"] == weights), None)
    if number is None:
        return Rescored(weights)
    rollout = recording.rollout
    plan = plan_of_rows(rollout, recording.header["plan"], packed=module.packing).to(module.device)
    index_of = {id(microbatch.layout): microbatch.index.cpu() for microbatch in plan.step(number)}
    logprobs = torch.zeros_like(cast(Tensor, recording.of_step(number, "logprobs")))
    entropy = torch.zeros_like(logprobs)

    def forward(layout: Layout) -> Outputs:
        outputs, (_, width) = policy(layout), layout.shape
        index = index_of[id(layout)]
        if len(index):
            logprobs[index, :width] = outputs.logprobs.detach().cpu()
            entropy[index, :width] = outputs.entropy.detach().cpu()
        return outputs

    contributions = module.run.contributions
    for callback in contributions.callbacks:
        if callback.name in (steps[number]["states"] or {}):
            callback.load_state_dict(rebuilt(steps[number]["states"][callback.name]))
    objective = Configuration.of(module, contributions.callbacks).objective(contributions)
    parallel = module.parallel
    accumulated(
        rollout.to(module.device), plan.step(number), cast(PolicyModel, forward), objective,
        global_sum=distributed.global_sum, global_concat=distributed.global_concat,
        around=lambda last: parallel.accumulating(policy, last=last),
        backward=lambda loss: module.manual_backward(loss * parallel.ranks),
    )  # fmt: skip
    norm = parallel.clipped_norm(policy, torch.inf).detach()
    return Rescored(weights, number, logprobs, entropy, norm)
