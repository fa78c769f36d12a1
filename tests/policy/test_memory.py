"""Bytes by arithmetic against those that autograd keeps and the allocator hands out on a CPU."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.streaming_memory import peaks
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    MambaConfig,
    OPTConfig,
)

from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import build_policy
from lightning_rl.policy.logprobs import chunk_elements, kept_chunks
from lightning_rl.policy.memory import (
    GIB,
    Activations,
    EngineRoom,
    LayerSizes,
    MemoryPlan,
    head_bytes,
    local_bytes,
    optimizer_weights,
    states_per_weight,
)
from lightning_rl.policy.model import PolicyModel
from lightning_rl.policy.packing import Layout, pack
from lightning_rl.rollout import Rollout

CLOSE = 0.2
LAYERS = 3
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": LAYERS, "vocab_size": 64, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the configuration, of LayerSizes.of
    "qwen2": ({}, {}),
    "llama": ({}, {}),
    "qwen3": ({}, {"head_norms": True}),
    "gemma3_text": ({"sliding_window": 64}, {"norms": 4, "head_norms": True}),
    "qwen3_moe": (MIXTURE, {"head_norms": True}),
}


@dataclass(frozen=True)
class Precision:
    """Dtypes of weights and of matrix products."""

    weights: torch.dtype
    compute: torch.dtype

    @property
    def bytes(self) -> dict[str, int]:
        """Arguments of the arithmetic."""
        return {"compute": self.compute.itemsize, "residual": self.weights.itemsize}

    def context(self) -> AbstractContextManager[object]:
        """Return the context of the Trainer's precision plugin for a forward."""
        if self.compute == self.weights:
            return nullcontext()
        return torch.autocast("cpu", self.compute, cache_enabled=False)


PRECISIONS = {
    "32-true": Precision(torch.float32, torch.float32),
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
}


def policy_of(
    family: str, precision: Precision, *, checkpointing: Checkpointing | None = None, lora: bool = False, **options: Any
) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family][0], **options})
    model: Any = AutoModelForCausalLM.from_config(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    policy = build_policy(lambda: model, None, temperature=1.0, packed=True, checkpointing=checkpointing)
    return policy.to(precision.weights)


def layout_of(tokens: int) -> Layout:
    """Sequences of many lengths, packed, which begin with different prompts."""
    draw, rows = random.Random(0), list[list[int]]()
    while sum(map(len, rows)) < tokens:
        rows.append([draw.randrange(64) for _ in range(draw.randrange(20, 120))])
    prompts = [[1 + number % 60] * 4 for number in range(len(rows))]
    return pack(Rollout.of_samples(prompts, rows, groups=range(len(rows))))


def note(build: Callable[..., None], tensors: list[Tensor]) -> Callable[..., None]:
    """Return a constructor that also appends the tensors it gets."""

    def building(self: object, value: object) -> None:
        tensors.extend([value] if isinstance(value, Tensor) else [])
        build(self, value)

    return building


def kept_by(policy: PolicyModel, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd and checkpoints keep of a forward, without parameters and buffers."""
    held, kept = {one.untyped_storage().data_ptr() for one in (*policy.parameters(), *policy.buffers())}, {}
    results = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    wrapper = torch.utils.checkpoint._VersionWrapper  # noqa: SLF001  a kept result of a selective checkpoint
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "__init__", note(wrapper.__init__, results))
        result = forward()
    for tensor in results:
        keep(tensor)
    assert result.requires_grad  # the graph lives, and with it every storage: none was counted under an old address
    return sum(kept.values())


def planned(
    family: str,
    policy: Any,
    layout: Layout,
    precision: Precision,
    *,
    checkpointing: Checkpointing | None = None,
    lora: bool = False,
) -> Activations:
    config, exact = policy.model.config, max(4, precision.weights.itemsize)  # the CPU multiplies the head in float32
    logits, limit = len(layout.source) * config.vocab_size, chunk_elements(torch.device("cpu"))
    entries = config.vocab_size * config.hidden_size
    head = head_bytes(
        entries=entries, chunk=min(logits, limit), operand=exact, weight=precision.weights.itemsize, trained=not lora
    )
    return Activations.of(
        LayerSizes.of(config, **FAMILIES[family][1]),
        layers=LAYERS,
        tokens=layout.input_ids.numel(),
        head=head,
        kept_logits=exact * min(max(0, logits - limit), kept_chunks(torch.device("cpu")) * limit) * (not lora),
        checkpointing=checkpointing,
        trained=not lora,
        **precision.bytes,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", [None, "full", "selective"])
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_those_that_autograd_keeps(
    family: str, precision: Precision, checkpointing: Checkpointing | None
) -> None:
    policy, layout = policy_of(family, precision, checkpointing=checkpointing), layout_of(1500)
    with precision.context():
        kept = kept_by(policy, lambda: policy(layout).logprobs)
    plan = planned(family, policy, layout, precision, checkpointing=checkpointing)
    assert plan.kept == pytest.approx(kept, rel=CLOSE)


@pytest.mark.parametrize("checkpointing", [None, "selective"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_activations_beside_frozen_weights_are_those_that_autograd_keeps(
    family: str, checkpointing: Checkpointing | None
) -> None:
    precision, layout = PRECISIONS["bf16-mixed"], layout_of(1500)
    policy = policy_of(family, precision, checkpointing=checkpointing, lora=True)
    with precision.context():
        kept = kept_by(policy, lambda: policy(layout).logprobs)
    plan = planned(family, policy, layout, precision, checkpointing=checkpointing, lora=True)
    assert plan.kept == pytest.approx(kept, rel=CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "checkpointing", "vocabulary"),
    [
        ("bf16-mixed", None, 64), ("bf16-mixed", "full", 4096), ("bf16-mixed", "selective", 64),
        ("32-true", "full", 64), ("32-true", "selective", 4096), ("bf16-true", None, 4096),
    ],
)  # fmt: skip
def test_the_height_of_an_update_is_that_of_the_allocator(
    name: str, checkpointing: Checkpointing | None, vocabulary: int
) -> None:
    precision = PRECISIONS[name]
    policy = policy_of("qwen2", precision, checkpointing=checkpointing, vocab_size=vocabulary)
    layout = layout_of(1000)

    def microbatch() -> None:
        with precision.context():
            loss = policy(layout).logprobs.sum()
        loss.backward()

    microbatch()  # gradients are there from now on
    plan = planned("qwen2", policy, layout, precision, checkpointing=checkpointing)
    assert plan.update == pytest.approx(peaks(microbatch)[0], rel=CLOSE)
    with torch.no_grad(), precision.context():
        scoring = peaks(lambda: policy(layout))[0]
    assert scoring <= plan.scoring


def test_a_layer_in_numbers() -> None:
    """Qwen2.5-0.5B under bf16-mixed: 69.4 kB per token and layer were measured."""
    layer = LayerSizes(hidden=896, query=896, key_value=128, feed_forward=4864, norms=2 * 896, head=64)
    assert layer.activations(compute=2, residual=4) == 8 * 1792 + 2 * (2688 + 256) + 8 * 4864 + 10 * 896 == 68096
    assert layer.activations(compute=2, residual=2) == 6 * 1792 + 2 * (2688 + 256) + 8 * 4864 + 4 * 896
    assert layer.matrices == 2 * 896 * 1024 + 3 * 896 * 4864
    assert layer.cache(layers=24, itemsize=2) == 2 * 24 * 128 * 2


def test_a_model_without_attention_has_sizes() -> None:
    """Mamba's configuration knows no heads."""
    assert LayerSizes.of(MambaConfig(hidden_size=8, expand=2)).feed_forward == 16


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (GPT2Config(n_embd=64), 256),
        (GPT2Config(n_embd=64, n_inner=96), 96),
        (OPTConfig(hidden_size=64, num_attention_heads=4, ffn_dim=160), 160),
        (BloomConfig(hidden_size=64, n_head=4), 256),
        (FalconConfig(hidden_size=64, num_attention_heads=4), 256),
        (SimpleNamespace(hidden_size=64, num_attention_heads=4, intermediate_size=[96, 128]), 128),
    ],
)
def test_every_name_of_the_size_of_a_feed_forward_is_known(config: Any, size: int) -> None:
    sizes = LayerSizes.of(config)
    assert sizes.feed_forward == size and sizes.activations(compute=2, residual=4) > 0


def test_layers_of_several_sizes_have_the_mean_of_them() -> None:
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=4, layer_types=kinds)
    layer = LayerSizes.of(config)
    assert layer.head == (3 * 256 + 512) / 4 and layer.query == 8 * layer.head and layer.key_value == 4 * layer.head


def test_the_head_in_numbers() -> None:
    """Logits and their half-precision copy or two blocks; sum, product and cast of the gradient; the cast matrix."""
    assert head_bytes(entries=100, chunk=7, operand=4, weight=4) == 7 * 5 + 100 * 4
    assert head_bytes(entries=100, chunk=7, operand=2, weight=4) == 7 * 6 + 100 * (2 + 8)
    assert head_bytes(entries=100, chunk=7, operand=2, weight=2) == 7 * 6 + 100 * (8 + 2)
    assert head_bytes(entries=100, chunk=7, operand=4, weight=2) == 7 * 5 + 100 * (4 + 4 + 2)
    assert head_bytes(entries=100, chunk=7, operand=2, weight=4, trained=False) == 7 * 6 + 100 * 2


def test_the_share_of_an_engine_is_what_the_trainer_leaves() -> None:
    """Qwen2.5-7B on one device of 141 GB: weights and two states of AdamW leave 0.32 of it, not 0.4."""
    parameters = 7.616e9
    room = EngineRoom(total=150.1e9, resident=12 * parameters, weights=2 * parameters, cache=57344 * 32768)
    assert (room.smallest, room.largest) == (0.13, 0.33)
    assert room.cure == "pass gpu_memory_utilization=0.33 to VLLMEngine"
    assert room.resident + 0.33 * room.total < 0.95 * room.total - GIB < room.resident + 0.34 * room.total


def test_a_device_without_room_for_an_engine_gets_other_advice() -> None:
    room = EngineRoom(total=80e9, resident=12 * 7.6e9, weights=2 * 7.6e9, cache=2e9)
    assert room.largest < 0 < room.smallest
    assert room.cure.startswith("vLLM needs 23% of the device, and 0% is left: take more devices")


def test_phases_add_up_what_lies_there_together() -> None:
    plan = MemoryPlan(
        weights=1, gradients=10, optimizer=100, reference=1000, replica=0, buckets=10**4, root=10**11, gathered=10**5,
        engine=10**6, asleep=10**7, activations=10**8, scoring=10**9, context=10**10,
    )  # fmt: skip
    assert plan.phases() == {"generate": 110001011101, "score": 111010111101, "update": 110110111111}


@pytest.mark.parametrize(
    ("build", "states"),
    [(AdamW, 2), (partial(SGD, lr=0.1), 0), (partial(SGD, lr=0.1, momentum=0.9), 1)],
    ids=["AdamW", "SGD", "momentum"],
)
def test_states_are_those_that_the_first_step_makes(build: Callable[..., Optimizer], states: int) -> None:
    weight = torch.zeros(1000, requires_grad=True)
    optimizer = build([weight])
    assert states_per_weight(optimizer) * local_bytes(optimizer_weights(optimizer)) == states * 4000
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = [state for by_name in optimizer.state.values() for state in by_name.values() if state is not None]
    assert local_bytes(held) == pytest.approx(states * 4000, abs=8), "the count of Adam's steps is a tensor"


def test_states_of_8_bits_are_counted_for_the_dtype_of_the_weights() -> None:
    optimizer = type("AdamW8bit", (AdamW,), {})([torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)])
    assert states_per_weight(optimizer) == 1
