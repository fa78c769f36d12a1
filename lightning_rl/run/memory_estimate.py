"""Estimate of the device memory of a run, by :mod:`lightning_rl.policy.memory`, and the token budget that fits."""

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_rl.generation.vllm.vllm_engine import CPU_CACHE, GPU_SHARE, VLLMEngine
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.logprobs import chunk_elements, kept_chunks
from lightning_rl.policy.lora import adapters_of
from lightning_rl.policy.memory import (
    CONTEXT,
    ENGINE_CONTEXT,
    GIB,
    GPU_MAX_TOKENS,
    MAX_TOKENS,
    ROUNDING,
    Activations,
    LayerSizes,
    MemoryPlan,
    head_bytes,
    local_bytes,
    states_per_weight,
    usable_memory,
)
from lightning_rl.rollout import Rollout
from lightning_rl.run.run import Run


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
    def of(cls, run: Run, max_prompt_length: int, samples: Rollout | None = None) -> Self:
        """Return the tokens of responses of maximum length, or of sampled conversations, whose replies are unknown."""
        parts = run.options.minibatches_per_rollout * run.parallel.ranks
        rows = run.data.prompts_per_rollout * run.options.group_size // parts
        budget = run.progress.max_tokens_per_microbatch
        if samples is None or not len(samples):
            longest = max_prompt_length + run.options.sampling.max_new_tokens
            return cls(longest, max(longest, min(budget, rows * longest)))
        lengths = samples.prompt_lengths + samples.response_lengths
        laid_out = pack(samples, packed=run.models.options.packing).input_ids.numel()  # a prompt once per group
        whole, longest = laid_out * rows / len(samples), int(lengths.max())
        return cls(longest, max(longest, round(min(whole, budget))))


def memory_plan(run: Run, max_prompt_length: int, samples: Rollout | None = None) -> MemoryPlan:
    """Compute the memory of a run whose policy is built and whose optimizer is configured.

    With ``activation_checkpointing=True``, the mode is selective if the update then fits into the memory of the device.

    Args:
        run: Run whose policy is built.
        max_prompt_length: Number of tokens of the longest prompt.
        samples: Sampled conversations; None for a run without environments.
    """
    tokens = Tokens.of(run, max_prompt_length, samples)
    policy, parallel, ranks = run.policy, run.parallel, run.trainer.world_size
    shards, stage = ranks if parallel.sharded else 1, _zero_stage(run)
    states = states_per_weight(run.trainer.optimizers[0])
    if stage:
        states = (4 + 8) / policy.model.dtype.itemsize  # float32 states and float32 weights
    trains = {name: weight.requires_grad for name, weight in policy.named_parameters()}
    weights = trained = outside = 0
    for name, weight in parallel.full_parameters(policy):
        size = weight.numel() * weight.element_size()
        weights += size
        trained += size * trains.get(name, True)
        outside += size * (not any(part.isdigit() for part in name.split(".")))  # embeddings and head
    gathered = _bytes_of_numbers(run)[1] / policy.model.dtype.itemsize * parallel.sharded
    layer = (weights - outside) / _layer_count(policy)
    mode = run.models.options.checkpointing
    activations = _activations(run, tokens.microbatch, mode)
    frozen = () if run.models.reference is None else run.models.reference.model.parameters()
    engine, cuda = _engine_bytes(run, tokens.row), run.device.type == "cuda"
    awake = (
        not run.options.engine.capabilities.sleeps
        if isinstance(run.options.engine, VLLMEngine)
        else run.options.max_staleness
    )
    plan = MemoryPlan(
        weights=weights / shards,
        gradients=trained / (ranks if stage == 2 else shards),
        buckets=trained * parallel.copies_gradients,
        optimizer=trained * states / (ranks if stage else shards),
        reference=local_bytes({*frozen} - {*policy.parameters()}),  # what it does not share with the policy
        replica=0 if run.models.replica is None else local_bytes(run.models.replica.parameters()),
        root=outside * gathered,
        gathered=3 * layer * gathered,  # a layer, the next one, and the gradient of a layer
        activations=activations.update,
        scoring=activations.scoring,
        engine=engine,
        asleep=engine if awake else ENGINE_CONTEXT * (cuda and isinstance(run.options.engine, VLLMEngine)),
        context=CONTEXT * cuda,
        checkpointing=mode,
    )
    if run.models.options.activation_checkpointing is not True:
        return plan
    activations = _activations(run, tokens.microbatch, "selective")
    faster = replace(plan, activations=activations.update, checkpointing="selective")
    return faster if faster.phases()["update"] <= usable_memory(run.device, run.trainer.num_devices) else plan


def fit_memory(run: Run) -> None:
    """Set token budget and activation checkpointing of a fit where the options leave them to the estimate.

    Every rank has to call this.
    """
    progress, options = run.progress, run.models.options
    if options.max_tokens_per_microbatch is None:
        budget = progress.budget
        tokens, derivation = token_budget(run) if budget is None else (budget[1], "of the checkpoint")
        progress.budget = None, -progress.max_over_ranks([-tokens])[0]
        rank_zero_info(f"max_tokens_per_microbatch={progress.budget[1]} ({derivation})")
    if options.activation_checkpointing is True:
        full = progress.max_over_ranks([checkpointing_that_fits(run) == "full"])[0]
        mode: Checkpointing = "full" if full else "selective"
        run.models.checkpoint_activations(run.policy, mode)
        progress.options = replace(progress.options, activation_checkpointing=mode)
        rank_zero_info(f'activation_checkpointing="{mode}" (of "selective" and "full", by the estimate of memory)')


def checkpointing_that_fits(run: Run) -> Checkpointing | None:
    """Return the mode of activation checkpointing of a run, as :func:`memory_plan`."""
    if _missing_sizes(run):
        return run.models.options.checkpointing
    return memory_plan(run, run.data.max_prompt_length()).checkpointing


def token_budget(run: Run) -> tuple[int, str]:
    """Compute the default of ``max_tokens_per_microbatch``, and the text of its derivation.

    The result is the largest multiple of 256 tokens whose microbatch fits beside weights, optimizer and engine, at
    least 256, at most 4096, and 16,384 on a GPU.

    Args:
        run: Run whose policy is built and whose optimizer is configured.
    """
    device = run.device
    if missing := _missing_sizes(run):
        return MAX_TOKENS, f"the model has no {missing[0]} in its configuration, from which memory is estimated"
    largest = GPU_MAX_TOKENS if device.type == "cuda" else MAX_TOKENS
    usable = usable_memory(device, run.trainer.num_devices)
    plan = memory_plan(run, run.data.max_prompt_length())

    def peak(tokens: int) -> float:
        part = _activations(run, tokens, run.models.options.checkpointing)
        phases = replace(plan, activations=part.update, scoring=part.scoring).phases()
        return max(phases["score"], phases["update"])

    tokens = max((n for n in range(ROUNDING, largest + 1, ROUNDING) if peak(n) <= usable), default=ROUNDING)
    each, fixed = (peak(2 * tokens) - peak(tokens)) / tokens / 1e6, peak(0) / GIB
    return tokens, f"{each:.2g} MB per token, in {usable / GIB:.1f} GiB, of which weights and others take {fixed:.1f}"


def _missing_sizes(run: Run) -> list[str]:
    """Return the names that the configuration of the policy lacks for an estimate."""
    text = run.policy.model.config.get_text_config()
    return [name for name in ("hidden_size", "num_hidden_layers", "vocab_size") if not hasattr(text, name)]


def _activations(run: Run, tokens: int, checkpointing: Checkpointing | None) -> Activations:
    if checkpointing == "selective" and run.models.options.backend:
        checkpointing = None  # an upper bound of what compiled layers keep
    policy, (compute, residual) = run.policy, _bytes_of_numbers(run)
    text: Any = policy.model.config.get_text_config()
    itemsize, adapted = min(policy.model.dtype.itemsize, residual), bool(adapters_of(policy.model))
    logits, limit = tokens * text.vocab_size, chunk_elements(run.device)
    head = head_bytes(
        entries=text.vocab_size * text.hidden_size,
        chunk=min(limit, logits),
        operand=compute if run.device.type == "cuda" else max(4, itemsize),
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
        kept_logits=max(4, itemsize) * min(max(0, logits - limit), kept_chunks(run.device) * limit) * (not adapted),
        checkpointing=checkpointing,
        trained=not adapted,
    )


def _engine_bytes(run: Run, row_tokens: int) -> float:
    """Return the bytes of an engine on this device during generation, without a copy of the policy."""
    engine, cuda = run.options.engine, run.device.type == "cuda"
    if isinstance(engine, VLLMEngine):
        cache = engine.options.get("kv_cache_memory_bytes", None if cuda else CPU_CACHE)
        if cache is not None:
            return engine_needs(run)[0] + cache + ENGINE_CONTEXT * cuda
        share = engine.options.get("gpu_memory_utilization", GPU_SHARE)
        return share * torch.cuda.get_device_properties(run.device).total_memory
    if not engine.capabilities.shares_policy:
        return 0
    rows = run.data.prompts_per_rollout // run.parallel.ranks * run.options.group_size
    rows = min(rows, engine.capabilities.max_rows or rows)
    text: Any = run.policy.model.config.get_text_config()
    keys_and_values = sum(_bytes_of_numbers(run)) / 2  # rotary embeddings convert keys to float32
    per_token = layer_sizes(run.policy).cache(layers=text.num_hidden_layers, itemsize=keys_and_values)
    return per_token * rows * row_tokens


def engine_needs(run: Run) -> tuple[float, float]:
    """Return the bytes on this device of a VLLMEngine's weights, and of the KV cache of one sequence."""
    engine, policy = cast(VLLMEngine, run.options.engine), run.policy
    text: Any = policy.model.config.get_text_config()
    itemsize = _bytes_of_numbers(run)[0] if engine.dtype is None else engine.dtype.itemsize
    weights = sum(w.numel() for name, w in run.parallel.full_parameters(policy) if name.startswith("model."))
    tokens, parts = engine.max_model_len or text.max_position_embeddings, engine.options.get("tensor_parallel_size", 1)
    cache = tokens * layer_sizes(policy).cache(layers=text.num_hidden_layers, itemsize=itemsize)
    return weights * itemsize / parts, cache / parts


def _bytes_of_numbers(run: Run) -> tuple[int, int]:
    """Return the bytes of a number in matrix products, and in the hidden states between layers."""
    weights, parallel = run.policy.model.dtype, run.parallel
    compute = parallel.compute_dtype(weights).itemsize
    return compute, compute if parallel.sharded else weights.itemsize  # sharded layers are gathered in that dtype


def _zero_stage(run: Run) -> int:
    strategy = run.parallel.strategy
    config = cast(dict[str, Any], strategy.config) if isinstance(strategy, DeepSpeedStrategy) else {}
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _layer_count(policy: PolicyModel) -> int:
    return policy.model.config.get_text_config().num_hidden_layers * len(policy.models())
