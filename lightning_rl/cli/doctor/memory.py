"""Memory: what a run holds on a device in each phase, estimated from the configuration alone.

=============  =====================================================================================
weights        parameters x bytes, over the ranks that share them; the same again for an engine's ``copy``
gradients      trained parameters x bytes
optimizer      trained parameters x bytes x number of states (2 for Adam and its kin)
reference      its parameters x bytes
cache          2 x layers x key-value heads x head size x bytes x tokens of all samples of a rank
activations    34 x layers x hidden size x tokens of a microbatch x bytes / 2; with checkpointing 2 x,
               and one layer whole; without gradient one layer; and the logits of a chunk
=============  =====================================================================================

Source of the 34: Korthikanti et al. 2022, arXiv:2205.05198, eq. 1 without the attention matrix, which is never held.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.finding import Finding
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Scorer
from lightning_rl.policy.logprobs import chunk_elements

GIB = 2**30
FULL = 0.95  # of the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, by what the table above says; ``forward`` are the activations of a pass that only scores."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    copy: float
    cache: float
    activations: float
    forward: float

    def phases(self) -> dict[str, float]:
        """Bytes at the height of each phase."""
        resident = self.weights + self.optimizer + self.reference
        return {
            "generate": resident + self.copy + self.cache,
            "score": resident + self.forward,
            "update": resident + self.gradients + self.activations,
        }


def memory_plan(module: RLLightningModule, max_prompt_length: int) -> MemoryPlan:
    """Estimates a run's memory.

    Args:
        module: with its policy built and its optimizer configured.
        max_prompt_length: tokens of the longest prompt.
    """
    policy, shards = module.required_policy, module.trainer.world_size if module.parallel.sharded else 1
    trains = {name: weight.requires_grad for name, weight in policy.named_parameters()}
    weights = trained = 0.0
    for name, weight in module.parallel.full_parameters(policy):
        weights += weight.numel() * weight.element_size() / shards
        trained += weight.numel() * weight.element_size() / shards * trains.get(name, True)
    reference, optimizers = module.run.reference, module.trainer.optimizers
    sgd = bool(optimizers) and isinstance(optimizers[0], SGD)
    shared = module.engine.capabilities.shares_policy and module.run.replica is None
    text: Any = policy.model.config.get_text_config()
    itemsize = 2 if "16" in str(module.trainer.precision) else policy.model.dtype.itemsize
    layer = 34 * text.hidden_size * module.token_budget * itemsize / 2
    layers = 2 / 34 * text.num_hidden_layers + 1 if module.activation_checkpointing else text.num_hidden_layers
    logits = 2.0 * 4 * min(chunk_elements(module.device), module.token_budget * text.vocab_size)
    return MemoryPlan(
        weights=weights,
        gradients=trained,
        optimizer=trained * (bool(optimizers[0].defaults.get("momentum")) if sgd else 2),
        reference=_bytes(reference.model) if type(reference) is Scorer else 0,  # or the policy without its adapters
        copy=0 if shared else _bytes(policy.model),
        cache=_cache(module, text, max_prompt_length + module.sampling.max_new_tokens),
        activations=layers * layer + logits,
        forward=layer + logits,
    )


def memory(module: RLLightningModule) -> Iterator[Finding]:
    """The height of every phase fits on the device."""
    plan = memory_plan(module, module.prompt_stream.max_prompt_length())
    parts = [(name, getattr(plan, name)) for name in ("weights", "gradients", "optimizer", "reference", "copy")]
    parts += [("KV cache", plan.cache), ("activations", plan.activations)]
    phases = plan.phases()
    by_part = ", ".join(f"{name} {_size(part)}" for name, part in parts if part)
    by_phase = ", ".join(f"{name} {_size(phase)}" for name, phase in phases.items())
    yield fact("memory", f"estimated, for each device: {by_part}\n{by_phase}")
    if module.device.type != "cuda":
        return
    yield from too_much(phases, torch.cuda.get_device_properties(module.device).total_memory)


def too_much(phases: dict[str, float], available: float) -> Iterator[Finding]:
    """Phases that do not fit into ``available`` bytes."""
    cures = {
        "generate": "fewer prompts_per_rollout or a smaller max_new_tokens, an engine that sleeps, or more devices",
        "score": "a smaller token_budget, or a strategy that shards",
        "update": "a smaller token_budget, activation_checkpointing=True, or a strategy that shards (fsdp2)",
    }
    for name, phase in phases.items():
        if phase > FULL * available:
            yield error("memory", f"{name} needs about {_size(phase)}, the device has {_size(available)}", cures[name])


def _cache(module: RLLightningModule, text: Any, max_tokens: int) -> float:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows = module.prompt_stream.prompts_per_rollout // module.parallel.ranks * module.group_size
    rows = min(rows, module.engine.capabilities.max_rows or rows)
    per_token = 2 * text.num_hidden_layers * heads * size * module.required_policy.model.dtype.itemsize
    return float(per_token * rows * max_tokens)


def _bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
