"""Estimation of the device memory of a run in each phase, by :mod:`lightning_rl.policy.memory`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.generation.vllm.vllm_engine import CPU_CACHE, GPU_SHARE, VLLMEngine
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.logprobs import chunk_elements
from lightning_rl.policy.lora import adapters_of
from lightning_rl.policy.memory import (
    CONTEXT,
    ENGINE_CONTEXT,
    GIB,
    USABLE,
    Activations,
    EngineRoom,
    LayerSizes,
    MemoryPlan,
    head_bytes,
    local_bytes,
    states_per_weight,
)
from lightning_rl.rollout import Rollout
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


def layer_sizes(policy: PolicyModel) -> LayerSizes:
    """Read the sizes of a policy's layers from its configuration and the norms of its first layer."""
    layer = next(iter(policy.layers()), nn.Identity())
    norms = [name for name, part in layer.named_modules() if type(part).__name__.endswith("Norm")]
    heads = [name for name in norms if name.endswith(("q_norm", "k_norm"))]
    config = policy.model.config.get_text_config()
    return LayerSizes.of(config, norms=len(norms) - len(heads) or 2, head_norms=bool(heads))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a run that memory depends on.

    Attributes:
        row: Maximum number of tokens of a row, prompt included.
        microbatch: Maximum number of tokens of a microbatch.
    """

    row: int
    microbatch: int

    @classmethod
    def of(cls, module: RLLightningModule, max_prompt_length: int, samples: Rollout | None = None) -> Self:
        """Return the tokens of responses of maximum length, or of sampled conversations, whose replies are unknown."""
        parts = module.minibatches_per_rollout * module.parallel.ranks
        rows = module.data_module.prompts_per_rollout * module.group_size // parts
        budget = module.models.options.max_tokens_per_microbatch
        if samples is None or not len(samples):
            longest = max_prompt_length + module.sampling.max_new_tokens
            return cls(longest, max(longest, min(budget, rows * longest)))
        lengths = samples.prompt_lengths + samples.response_lengths
        laid_out = pack(samples, packed=module.models.options.packing).input_ids.numel()  # a prompt once per group
        whole, longest = laid_out * rows / len(samples), int(lengths.max())
        return cls(longest, max(longest, round(min(whole, budget))))


def memory_plan(module: RLLightningModule, max_prompt_length: int, samples: Rollout | None = None) -> MemoryPlan:
    """Compute the memory of a run whose policy is built and whose optimizer is configured.

    Args:
        module: Module of the run.
        max_prompt_length: Number of tokens of the longest prompt.
        samples: Sampled conversations; None for a run without environments.
    """
    tokens = Tokens.of(module, max_prompt_length, samples)
    policy, parallel, ranks = module.required_policy, module.parallel, module.trainer.world_size
    shards, stage = ranks if parallel.sharded else 1, _zero_stage(module)
    states = states_per_weight(module.trainer.optimizers[0])
    if stage:
        states = (4 + 8) / policy.model.dtype.itemsize  # float32 states and float32 weights
    trains = {name: weight.requires_grad for name, weight in policy.named_parameters()}
    weights = trained = outside = 0
    for name, weight in parallel.full_parameters(policy):
        size = weight.numel() * weight.element_size()
        weights += size
        trained += size * trains.get(name, True)
        outside += size * (not any(part.isdigit() for part in name.split(".")))  # embeddings and head
    gathered = _bytes_of_numbers(module)[1] / policy.model.dtype.itemsize * parallel.sharded
    layer = (weights - outside) / _layer_count(policy)
    activations = _activations(module, tokens.microbatch)
    frozen = () if module.models.reference is None else module.models.reference.model.parameters()
    engine, cuda = _engine_bytes(module, tokens.row), module.device.type == "cuda"
    awake = not module.engine.capabilities.sleeps if isinstance(module.engine, VLLMEngine) else module.max_staleness
    return MemoryPlan(
        weights=weights / shards,
        gradients=trained / (ranks if stage == 2 else shards),
        buckets=trained * parallel.copies_gradients,
        optimizer=trained * states / (ranks if stage else shards),
        reference=local_bytes({*frozen} - {*policy.parameters()}),  # what it does not share with the policy
        replica=0 if module.models.replica is None else local_bytes(module.models.replica.parameters()),
        root=outside * gathered,
        gathered=3 * layer * gathered,  # a layer, the next one, and the gradient of a layer
        activations=activations.update,
        scoring=activations.scoring,
        engine=engine,
        asleep=engine if awake else ENGINE_CONTEXT * (cuda and isinstance(module.engine, VLLMEngine)),
        context=CONTEXT * cuda,
    )


def engine_room(module: RLLightningModule, plan: MemoryPlan, total: float) -> EngineRoom | None:
    """Compute the share that a VLLMEngine can take of a device with ``total`` bytes; None for other engines."""
    if not isinstance(module.engine, VLLMEngine):
        return None
    weights, cache = _engine_needs(module)
    return EngineRoom(total=total, resident=plan.resident, weights=weights, cache=cache)


def memory(module: RLLightningModule, samples: Rollout | None = None) -> Iterator[Finding]:
    """Check that every phase fits on the device, with the lengths of sampled conversations if there are any."""
    plan = memory_plan(module, module.data_module.max_prompt_length(), samples)
    by_part = ", ".join(f"{PARTS[name]} {_size(part)}" for name in PARTS if (part := getattr(plan, name)))
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


def _activations(module: RLLightningModule, tokens: int) -> Activations:
    policy, (compute, residual) = module.required_policy, _bytes_of_numbers(module)
    text: Any = policy.model.config.get_text_config()
    itemsize, adapted = min(policy.model.dtype.itemsize, residual), bool(adapters_of(policy.model))
    head = head_bytes(
        entries=text.vocab_size * text.hidden_size,
        chunk=min(chunk_elements(module.device), tokens * text.vocab_size),
        operand=compute if module.device.type == "cuda" else max(4, itemsize),
        weight=itemsize,
        trained=not adapted,
    )
    return Activations.of(
        layer_sizes(policy),
        layers=_layer_count(policy),
        tokens=tokens,
        compute=compute,
        residual=residual,
        head=head,
        checkpointing=module.models.options.activation_checkpointing,
        trained=not adapted,
    )


def _engine_bytes(module: RLLightningModule, row_tokens: int) -> float:
    """Return the bytes of an engine on this device during generation, without a copy of the policy."""
    engine, cuda = module.engine, module.device.type == "cuda"
    if isinstance(engine, VLLMEngine):
        cache = engine.options.get("kv_cache_memory_bytes", None if cuda else CPU_CACHE)
        if cache is not None:
            return _engine_needs(module)[0] + cache + ENGINE_CONTEXT * cuda
        share = engine.options.get("gpu_memory_utilization", GPU_SHARE)
        return share * torch.cuda.get_device_properties(module.device).total_memory
    if not engine.capabilities.shares_policy:
        return 0
    rows = module.data_module.prompts_per_rollout // module.parallel.ranks * module.group_size
    rows = min(rows, engine.capabilities.max_rows or rows)
    text: Any = module.required_policy.model.config.get_text_config()
    keys_and_values = sum(_bytes_of_numbers(module)) / 2  # rotary embeddings convert keys to float32
    per_token = layer_sizes(module.required_policy).cache(layers=text.num_hidden_layers, itemsize=keys_and_values)
    return per_token * rows * row_tokens


def _engine_needs(module: RLLightningModule) -> tuple[float, float]:
    """Return the bytes on this device of a VLLMEngine's weights, and of the KV cache of one sequence."""
    engine, policy = cast(VLLMEngine, module.engine), module.required_policy
    text: Any = policy.model.config.get_text_config()
    itemsize = _bytes_of_numbers(module)[0] if engine.dtype is None else engine.dtype.itemsize
    weights = sum(w.numel() for name, w in module.parallel.full_parameters(policy) if name.startswith("model."))
    tokens, parts = engine.max_model_len or text.max_position_embeddings, engine.options.get("tensor_parallel_size", 1)
    cache = tokens * layer_sizes(policy).cache(layers=text.num_hidden_layers, itemsize=itemsize)
    return weights * itemsize / parts, cache / parts


def _bytes_of_numbers(module: RLLightningModule) -> tuple[int, int]:
    """Return the bytes of a number in matrix products, and in the hidden states between layers."""
    weights, parallel = module.required_policy.model.dtype, module.parallel
    compute = parallel.compute_dtype(weights).itemsize
    return compute, compute if parallel.sharded else weights.itemsize  # sharded layers are gathered in that dtype


def _zero_stage(module: RLLightningModule) -> int:
    strategy = module.parallel.strategy
    config = cast(dict[str, Any], strategy.config) if isinstance(strategy, DeepSpeedStrategy) else {}
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _layer_count(policy: PolicyModel) -> int:
    return policy.model.config.get_text_config().num_hidden_layers * len(policy.models())


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
