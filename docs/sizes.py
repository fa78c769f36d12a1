"""Writes the table of sizes in docs/strategies.md from the arithmetic of the doctor. Run ``python docs/sizes.py``.

The models have no weights: they are built on the meta device from the configurations below.
"""

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_rl.generation.vllm.vllm_engine import GPU_SHARE
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.logprobs import DEVICE_KEPT, chunk_of
from lightning_rl.policy.memory import (
    ENGINE_CONTEXT,
    GIB,
    USABLE,
    Activations,
    EngineRoom,
    LayerSizes,
    MemoryPlan,
    head_bytes,
)

PAGE = Path(__file__).with_name("strategies.md")
BEGIN, END = "<!-- docs/sizes.py writes what follows -->\n", "<!-- up to here -->\n"

WEIGHT, COMPUTE = 4, 2  # bytes of a number under bf16-mixed: in the weights, in matrix products
RANK = 16  # of LoRA, at every linear layer
CONTEXT_WINDOW = 32_768  # of the engine, as the configurations of Qwen2.5 say
MODELS = {  # hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied head
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
DEVICES = {"24": int(23.5 * GIB), "80": int(79.1 * GIB), "141": int(139.8 * GIB)}  # names in GB, bytes as CUDA says
NUMBERS = (1, 8)
MODES: tuple[Checkpointing | None, ...] = (None, "selective", "full")  # activation_checkpointing
ORDER = (*product((16_384, 8192), MODES[:2]), *product((16_384, 8192, 4096), MODES[2:]))  # with the token budget
SIGNS = {None: "", "selective": "‡", "full": "†"}


class Model(NamedTuple):
    """A model as the arithmetic takes it.

    Attributes:
        sizes: of a layer.
        layers: number of layers.
        inside: number of weights in the layers.
        outside: number of weights outside of them.
        head: entries of the vocabulary head.
        vocabulary: number of tokens.
        adapters: number of weights of LoRA adapters.
    """

    sizes: LayerSizes
    layers: int
    inside: int
    outside: int
    head: int
    vocabulary: int
    adapters: int


class Fit(NamedTuple):
    """Settings with which a run fits.

    Attributes:
        strategy: of the Trainer.
        budget: ``max_tokens_per_microbatch``.
        checkpointing: ``activation_checkpointing``; None for False.
        share: ``gpu_memory_utilization``.
        split: ``tensor_parallel_size`` of the engine.
    """

    strategy: str
    budget: int
    checkpointing: Checkpointing | None
    share: float
    split: int

    def __str__(self) -> str:
        """Write a cell of the table."""
        split = f"tp{self.split}" if self.split > 1 else ""
        settings = (self.strategy, f"{self.budget // 1024}k{SIGNS[self.checkpointing]}", f"{self.share:.2f}", split)
        return ", ".join(setting for setting in settings if setting)


@cache
def model_of(name: str) -> Model:
    """Count the weights of a size of Qwen2.5."""
    hidden, layers, heads, key_value_heads, feed_forward, vocabulary, tied = MODELS[name]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_value_heads,
        intermediate_size=feed_forward, vocab_size=vocabulary, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    inside = sum(weight.numel() for weight in model.model.layers.parameters())
    linear = [part for part in model.model.layers.modules() if isinstance(part, nn.Linear)]
    return Model(
        sizes=LayerSizes.of(config),
        layers=layers,
        inside=inside,
        outside=sum(weight.numel() for weight in model.parameters()) - inside,
        head=hidden * vocabulary,
        vocabulary=vocabulary,
        adapters=sum(RANK * (part.in_features + part.out_features) for part in linear),
    )


def plan_of(model: Model, memory: int, devices: int, fit: Fit, *, lora: bool) -> MemoryPlan:
    """Compute the memory of a run on one of ``devices`` devices with ``memory`` bytes each."""
    sharded = fit.strategy == "fsdp2"
    shards, gathered = devices if sharded else 1, COMPUTE if sharded else WEIGHT  # bytes of a weight in a forward
    numbers, trained = model.inside + model.outside + lora * model.adapters, model.inside + model.outside
    trained = model.adapters if lora else trained
    logits, limit = fit.budget * model.vocabulary, chunk_of(memory)
    head = head_bytes(
        entries=model.head,
        chunk=min(limit, logits),
        operand=COMPUTE,
        weight=gathered,
        trained=not lora,
    )
    activations = Activations.of(
        model.sizes,
        layers=model.layers,
        tokens=fit.budget,
        compute=COMPUTE,
        residual=gathered,
        head=head,
        kept_logits=4 * min(max(0, logits - limit), DEVICE_KEPT * limit) * (not lora),
        checkpointing=fit.checkpointing,
        trained=not lora,
    )
    return MemoryPlan(
        weights=WEIGHT * numbers / shards,
        gradients=WEIGHT * trained / shards,
        optimizer=2 * WEIGHT * trained / shards,
        buckets=WEIGHT * trained * (fit.strategy == "ddp"),
        root=gathered * model.outside * sharded,
        gathered=3 * gathered * model.inside / model.layers * sharded,
        activations=activations.update,
        scoring=activations.scoring,
        engine=fit.share * memory,
        asleep=ENGINE_CONTEXT,
    )


def fit_of(name: str, device: str, devices: int, *, lora: bool) -> Fit | None:
    """Find the first settings with which a run fits, and the largest share of its engine up to the default."""
    model, memory = model_of(name), DEVICES[device]
    strategies = ("ddp", "fsdp2") if devices > 1 else ("",)
    splits = [split for split in (1, 2, 4, 8) if split <= devices]
    for (budget, checkpointing), strategy, split in product(ORDER, strategies, splits):
        fit = Fit(strategy, budget, checkpointing, 0, split)
        plan = plan_of(model, memory, devices, fit, lora=lora)
        weights = COMPUTE * (model.inside + model.outside)
        cache = CONTEXT_WINDOW * model.sizes.cache(layers=model.layers, itemsize=COMPUTE)
        room = EngineRoom(total=memory, resident=plan.resident, weights=weights / split, cache=cache / split)
        share = min(GPU_SHARE, room.largest)
        if share >= room.smallest and max(plan.phases().values()) <= USABLE * memory:
            return fit._replace(share=share)
    return None


def table() -> str:
    """Build the table: a row for each model, a cell for each device and number of them."""
    columns = list(product(DEVICES, NUMBERS))
    lines = [f"| Qwen2.5 | trained | {' | '.join(f'{number} x {device} GB' for device, number in columns)} |"]
    lines.append(f"|{'---|' * (len(columns) + 2)}")
    for name, lora in product(MODELS, (False, True)):
        cells = [str(fit_of(name, device, number, lora=lora) or "no") for device, number in columns]
        lines.append(f"| {name} | {'LoRA' if lora else 'all'} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
