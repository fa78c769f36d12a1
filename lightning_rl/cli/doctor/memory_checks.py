"""Check that a run fits on its device, by :mod:`lightning_rl.run.memory_estimate`."""

from collections.abc import Iterator

import torch

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.generation.vllm.vllm_engine import VLLMEngine
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.memory import GIB, USABLE, EngineRoom, MemoryPlan
from lightning_rl.rollout import Rollout
from lightning_rl.run.memory_estimate import engine_needs, memory_plan
from lightning_rl.utils.finding import Finding

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "buckets": "buckets of DDP",
    "root": "whole embeddings and head",
    "gathered": "gathered layers",
    "optimizer": "optimizer",
    "reference": "reference",
    "replica": "copy for generation",
    "engine": "engine",
    "activations": "activations",
    "context": "CUDA context",
}


def engine_room(module: RLLightningModule, plan: MemoryPlan, total: float) -> EngineRoom | None:
    """Compute the share that a VLLMEngine can take of a device with ``total`` bytes; None for other engines."""
    if not isinstance(module.options.engine, VLLMEngine):
        return None
    weights, cache = engine_needs(module.run)
    return EngineRoom(total=total, resident=plan.resident, weights=weights, cache=cache)


def memory(module: RLLightningModule, samples: Rollout | None = None) -> Iterator[Finding]:
    """Check that every phase fits on the device, with the lengths of sampled conversations if there are any."""
    plan = memory_plan(module.run, module.data_module.max_prompt_length(), samples)
    by_part = ", ".join(f"{PARTS[name]} {_size(part)}" for name in PARTS if (part := getattr(plan, name)))
    by_part += "" if plan.checkpointing is None else f' (activation_checkpointing="{plan.checkpointing}")'
    by_phase = ", ".join(f"{name} {_size(phase)}" for name, phase in plan.phases().items())
    basis = "" if samples is None else f" for conversations like the {len(samples)} sampled ones"
    yield fact("memory", f"estimated{basis}, per device: {by_part}\n{by_phase}")
    if module.device.type == "cuda":
        total = torch.cuda.get_device_properties(module.device).total_memory
        yield from too_much(plan, total, engine_room(module, plan, total))


def too_much(plan: MemoryPlan, available: float, room: EngineRoom | None = None) -> Iterator[Finding]:
    """Report the phases that do not fit into ``available`` bytes; ``room`` is that of a VLLMEngine."""
    fewer = "fewer prompts_per_rollout, a smaller max_new_tokens, TransformersEngine(max_rows=) or more devices"
    cures = {
        "generate": fewer if room is None else room.cure,
        "score": "a smaller max_tokens_per_microbatch, or a strategy that shards",
        "update": "a smaller max_tokens_per_microbatch, activation_checkpointing=True, or a sharding strategy (fsdp2)",
    }
    for name, phase in plan.phases().items():
        if phase > USABLE * available:
            yield error("memory", f"{name} needs about {_size(phase)}, the device has {_size(available)}", cures[name])


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
