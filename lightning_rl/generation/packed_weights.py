"""Linear layers that multiply by packed weights while a model decodes on a CPU.

oneDNN copies a weight once into the order in which its kernels read it. Products then take less time, and their last
bits differ.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.policy.batch_invariance import is_batch_invariant

MIN_WEIGHTS = 2**22  # elements of all layers; those of smaller models stay in the cache of a CPU
MIN_LAYER = 2**16  # elements of a layer; the matrices of an adapter are smaller
MAX_ROWS, ROUNDS = 64, 3  # of the measurement
GAIN = 0.8  # of the time of plain products, below which packed ones are used


def packable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the plain float32 linear layers of a large model on a CPU; none of a batch-invariant model."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not known or is_batch_invariant(model) or torch.is_autocast_enabled("cpu"):
        return []
    layers = [
        part
        for part in model.modules()
        if type(part) is nn.Linear
        and type(part.weight) is nn.Parameter  # not quantized
        and "forward" not in vars(part)  # replaced, as by a hook of accelerate
        and (part.weight.device.type, part.weight.dtype) == ("cpu", torch.float32)
        and part.weight.numel() >= MIN_LAYER
    ]
    return layers if sum(layer.weight.numel() for layer in layers) >= MIN_WEIGHTS else []


@torch.no_grad()
def packing_pays(layers: Sequence[nn.Linear], *, rows: int, tokens: int) -> bool:
    """Measure the products of one layer of each shape, and the time to pack its weight.

    Args:
        layers: Linear layers.
        rows: Number of rows that decode together.
        tokens: Number of decode steps with the same packed weights.

    Returns:
        True if packing takes less than :data:`GAIN` of the time; False also if torch cannot pack these weights.
    """
    plain = packed = 0.0
    counts = Counter(layer.weight.shape for layer in layers)
    try:
        for shape, layer in {layer.weight.shape: layer for layer in layers}.items():
            hidden, copy = layer.weight.new_ones(min(rows, MAX_ROWS), 1, shape[1]), pack(layer.weight)
            ways = (
                partial(functional.linear, hidden, layer.weight, layer.bias),
                partial(_product, copy, layer, hidden),
                partial(pack, layer.weight),
            )
            rounds = [[_seconds(way) for way in ways] for _ in range(1 + ROUNDS)]
            linear, product, packing = map(min, zip(*rounds[1:], strict=True))
            plain += counts[shape] * tokens * linear
            packed += counts[shape] * (tokens * product + packing)
    except RuntimeError:
        return False
    return packed < GAIN * plain


@contextmanager
def packed_weights(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Make layers multiply by packed copies of their weights, which must not change inside.

    A weight is packed at the first product of its layer, and its copy is freed at the end.
    """
    copies: dict[nn.Linear, Tensor] = {}

    def forward(layer: nn.Linear, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... N"]:
        if layer not in copies:
            copies[layer] = pack(layer.weight)
        return _product(copies[layer], layer, hidden)

    before = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = partial(forward, layer)
    try:
        yield
    finally:
        for layer, value in before:
            del layer.forward
            if value is not None:
                vars(layer)["forward"] = value


def pack(weight: Float[Tensor, "N H"]) -> Tensor:
    """Return a packed copy of a weight, in oneDNN's order; the same for every number of rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # noqa: SLF001  inductor's operations


def _product(copy: Tensor, layer: nn.Linear, hidden: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, copy, layer.bias, "none", [], "")  # noqa: SLF001


def _seconds(product: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    product()
    return time.perf_counter() - begin
