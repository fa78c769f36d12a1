"""Estimate of a run's memory per phase, computed from sizes alone without a device.

Activations are those that autograd saves in the layers of transformers; tests compare them with a CPU.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.model import FrozenModel, PolicyModel

GIB = 2**30
USABLE = 0.95  # share of a device's memory; the rest is lost to fragmentation
HOST_USABLE = 0.5  # share of a machine's memory; the rest is for data, rewards and other programs
CONTEXT = GIB  # CUDA context, workspaces, NCCL buffers; an allowance, not measured
ENGINE_CONTEXT = GIB  # profile run and CUDA graphs of vLLM, which stay in sleep; an allowance, not measured
IN_FLIGHT = 0.25  # gradients inside a layer in the backward, as a share of its saved activations; measured

MAX_TOKENS = 4096  # of the default budget; more tokens per microbatch are not faster on a CPU
GPU_MAX_TOKENS = 16_384
ROUNDING = 256  # tokens; default budgets are multiples of it

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a number of bytes, or "max"

FEED_FORWARD_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Numbers per token in a transformer layer.

    Attributes:
        hidden: size of the hidden states.
        query: size of all query heads together.
        key_value: size of all key heads together, and of all value heads.
        feed_forward: size between the matrices of the feed-forward, or of one expert.
        norms: sizes of all norms of the layer, summed.
        head: size of one attention head.
        experts: number of experts that a token takes; 0 for a dense feed-forward.
    """

    hidden: int
    query: int
    key_value: int
    feed_forward: int
    norms: int
    head: int
    experts: int = 0

    @classmethod
    def of(cls, config: Any, *, norms: int = 2, head_norms: bool = False) -> Self:
        """Read the sizes from a configuration of transformers.

        Args:
            config: text configuration of the model.
            norms: number of norms of hidden states in a layer.
            head_norms: True if queries and keys have norms too.
        """
        if getattr(config, "is_heterogeneous", False):  # Gemma 4: the mean of its layers
            layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
            sizes = [asdict(cls.of(layer, norms=norms, head_norms=head_norms)) for layer in layers]
            return cls(**{name: round(sum(layer[name] for layer in sizes) / len(sizes)) for name in sizes[0]})
        heads, hidden = getattr(config, "num_attention_heads", None) or 1, config.hidden_size  # Mamba has no heads
        head = getattr(config, "head_dim", None) or hidden // heads
        query, key_value = head * heads, head * (getattr(config, "num_key_value_heads", None) or heads)
        experts = getattr(config, "num_experts_per_tok", None) or 0
        names = ("moe_intermediate_size",) * bool(experts) + FEED_FORWARD_NAMES
        feed_forward = next((size for name in names if (size := getattr(config, name, None))), 4 * hidden)
        return cls(
            hidden=hidden,
            query=query,
            key_value=key_value,
            feed_forward=max(feed_forward) if isinstance(feed_forward, list | tuple) else feed_forward,
            norms=norms * hidden + head_norms * (query + key_value),
            head=head,
            experts=experts,
        )

    @property
    def matrices(self) -> int:
        """Number of entries of the layer's linear modules, without experts, which autocast does not cast."""
        attention = 2 * self.hidden * (self.query + self.key_value)
        return attention if self.experts else attention + 3 * self.hidden * self.feed_forward

    def activations(self, *, compute: int, residual: int, trained: bool = True) -> int:
        """Count the bytes per token that autograd keeps of the layer.

        A norm computes in float32. It keeps its input and, if its weight is trained, the normalized input. Attention
        keeps queries, keys, values and its output, which is kept again as the input of the output projection. The
        feed-forward keeps the gate, the activation of the gate, the other half and their product. Each matrix keeps
        its input: under autocast a separate cast, otherwise one for all matrices that share it.

        Args:
            compute: bytes of a number in matrix products.
            residual: bytes of a number in the hidden states between layers; above ``compute`` under autocast.
            trained: False if only adapters are trained.
        """
        norms = (4 + residual * trained) * self.norms
        attention = compute * (3 * self.query + 2 * self.key_value)
        if self.experts:  # computed in the dtype of the hidden states; input and output of each expert are saved too
            inputs, feed_forward = 4, self.experts * residual * (2 * self.hidden + 4 * self.feed_forward)
        else:
            inputs, feed_forward = 5, 4 * compute * self.feed_forward
        return norms + attention + feed_forward + compute * self.hidden * (inputs if compute < residual else 2)

    def products(self, *, compute: int, residual: int) -> int:
        """Count the bytes per token of the results of matrix products and attention, args as :meth:`activations`."""
        attention = compute * (2 * self.query + 2 * self.key_value + self.hidden)
        number = residual * self.experts if self.experts else compute  # experts compute in the dtype of hidden states
        return attention + number * (self.hidden + 2 * self.feed_forward)

    def cache(self, *, layers: int, itemsize: float) -> float:
        """Count the bytes per token of the keys and values of all layers."""
        return 2 * layers * self.key_value * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of a microbatch.

    Attributes:
        kept: Bytes from the forward to the backward: activations, and autocast's copies of weights.
        working: Further bytes at the peak of the backward: the vocabulary head, or a layer.
        scoring: Maximum bytes in a forward without gradient.
    """

    kept: float
    working: float
    scoring: float

    @classmethod
    def of(
        cls,
        sizes: LayerSizes,
        *,
        layers: int,
        tokens: int,
        compute: int,
        residual: int,
        head: float,
        kept_logits: float = 0,
        checkpointing: Checkpointing | None = None,
        trained: bool = True,
    ) -> Self:
        """Count the bytes of a policy.

        Args:
            sizes: sizes of a layer.
            layers: number of layers.
            tokens: tokens of the microbatch.
            compute: as in :meth:`LayerSizes.activations`, like ``residual`` and ``trained``.
            residual: as there.
            head: bytes of the vocabulary head, :func:`head_bytes`.
            kept_logits: bytes of logits beyond a chunk that the head keeps for the backward.
            checkpointing: mode of activation checkpointing of layers.
            trained: as there.
        """
        layer = tokens * sizes.activations(compute=compute, residual=residual, trained=trained)
        casts = sizes.matrices * compute * (compute < residual)
        states = tokens * sizes.hidden * residual
        norm, angles = tokens * sizes.hidden * (4 + residual * trained), tokens * sizes.head * 2 * residual
        last = norm + states + angles  # states: the input of the head
        products = tokens * sizes.products(compute=compute, residual=residual) * (checkpointing == "selective")
        recomputed = (layer + casts - products) * (checkpointing is not None)
        return cls(
            kept=last + layers * (states + products if checkpointing else layer + casts),
            working=max(head + kept_logits + states, IN_FLIGHT * layer + recomputed),
            scoring=last + max(head, layer + casts),
        )

    @property
    def update(self) -> float:
        """Bytes at the peak of the backward."""
        return self.kept + self.working


def head_bytes(*, entries: int, chunk: int, operand: int, weight: int, trained: bool = True) -> float:
    """Count the bytes of the vocabulary head's buffers in the backward.

    Args:
        entries: entries of its matrix.
        chunk: logits held at once.
        operand: bytes of a number in its matrix products.
        weight: bytes of a number in its parameter.
        trained: False for a frozen matrix.
    """
    exact = max(weight, 4)  # of logits, and of the accumulated gradient of the matrix
    logits = chunk * (exact + max(exact / 4, operand * (operand < exact)))  # temporaries of a block, or a cast
    gradient = (
        exact + exact * (operand < exact) + weight * (weight < exact)
    )  # the sum, the product of a chunk, the cast
    return logits + entries * (operand * (operand != weight) + gradient * trained)


def usable_memory(device: torch.device, ranks: int) -> float:
    """Return the bytes that a rank may use: of its GPU, or its part of the memory of a machine or container.

    Args:
        device: Device of the rank.
        ranks: Number of ranks on the machine.
    """
    if device.type == "cuda":
        return USABLE * torch.cuda.get_device_properties(device).total_memory
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else ""
    return HOST_USABLE * min(memory, int(limit) if limit.isdecimal() else memory) / ranks


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors on this rank."""
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


def optimizer_weights(optimizer: Optimizer) -> list[Tensor]:
    """Return this rank's weights of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def states_per_weight(optimizer: Optimizer) -> float:
    """Return the bytes of an optimizer's states per byte of its weights: two states for Adam-like ones."""
    if isinstance(optimizer, SGD):
        return float(bool(optimizer.defaults.get("momentum")))
    return 2 / optimizer_weights(optimizer)[0].itemsize if "8bit" in type(optimizer).__name__ else 2.0


def resident_bytes(
    policy: PolicyModel, reference: FrozenModel | None, optimizer: Optimizer | None, *, copies_gradients: bool
) -> float:
    """Return the bytes that a rank holds during generation.

    Args:
        policy: Policy with its critic.
        reference: Reference of the run.
        optimizer: Optimizer of a fit; None outside of a fit.
        copies_gradients: True if the strategy holds a second copy of the gradients.
    """
    frozen = () if reference is None else reference.model.parameters()
    weights = local_bytes({*policy.parameters(), *frozen})  # the reference may share parameters of the policy
    if optimizer is None:
        return weights
    trained = local_bytes(optimizer_weights(optimizer))
    return weights + trained * (states_per_weight(optimizer) + copies_gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """Room for vLLM in the process of the trainer.

    Attributes:
        total: bytes of the device.
        resident: bytes of the trainer while the engine is awake: weights, optimizer states, reference.
        weights: bytes of the engine's weights on the device.
        cache: bytes of the keys and values of a sequence of ``max_model_len`` tokens.
    """

    total: float
    resident: float
    weights: float
    cache: float

    @property
    def largest(self) -> float:
        """Largest ``gpu_memory_utilization`` beside the trainer; not above 0 if there is none."""
        return math.floor(100 * (USABLE - (self.resident + CONTEXT) / self.total)) / 100

    @property
    def smallest(self) -> float:
        """Smallest ``gpu_memory_utilization`` with which vLLM starts: its weights and one sequence."""
        return math.ceil(100 * (self.weights + self.cache + ENGINE_CONTEXT) / self.total) / 100

    @property
    def cure(self) -> str:
        """Advice for a share that does not fit."""
        if self.smallest <= self.largest:
            return f"pass gpu_memory_utilization={self.largest:g} to VLLMEngine"
        return (
            f"vLLM needs {self.smallest:.0%} of the device, and {max(self.largest, 0):.0%} is left: take "
            'more devices and strategy="fsdp2", LoRA, a smaller max_model_len, or VLLMServerEngine on other devices'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a run on one device.

    Attributes:
        weights: Weights of policy and critic.
        gradients: Gradients of trained weights.
        optimizer: States of the optimizer.
        activations: Activations of a microbatch in the update.
        scoring: Activations of a microbatch without gradient.
        engine: Memory of the awake engine: the share of vLLM, or the cache of the embedded engine.
        asleep: Memory of the engine outside of generation.
        reference: Weights of the reference.
        replica: Copy of the policy with which the embedded engine decodes.
        buckets: Second copy of the gradients, kept by DDP.
        root: Weights outside of the layers, which a sharding strategy keeps unsharded after a forward.
        gathered: Weights and gradients of layers that are unsharded in forward and backward.
        context: CUDA context and workspaces.
        checkpointing: Mode of activation checkpointing with these activations.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    scoring: float
    engine: float
    asleep: float = 0
    reference: float = 0
    replica: float = 0
    buckets: float = 0
    root: float = 0
    gathered: float = 0
    context: float = CONTEXT
    checkpointing: Checkpointing | None = None

    @property
    def resident(self) -> float:
        """Bytes of the trainer in every phase."""
        return self.weights + self.optimizer + self.reference + self.replica + self.buckets + self.root

    def phases(self) -> dict[str, float]:
        """Return the bytes at the peak of each phase."""
        always = self.context + self.resident
        return {
            "generate": always + self.engine,
            "score": always + self.asleep + self.scoring + self.gathered,
            "update": always + self.asleep + self.gradients + self.activations + self.gathered,
        }
