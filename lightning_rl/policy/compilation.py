"""Compilation of the parts of a model's layers with ``torch.compile``, in place.

The parts of a decoder layer (norms, attention, feed-forward) are compiled instead of the layer: activation checkpoints
and the hooks of a sharding strategy stay outside, and layers of a kind share their code. Lengths are dynamic, and the
attention function, whose kernel is compiled already, is excluded, so other shapes do not recompile. Decoding runs
without compilation.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from lightning_rl.policy.packing import PACKED_ATTENTION, packed_attention_forward
from lightning_rl.policy.text_model import modules_behind

BACKENDS = ("inductor", "aot_eager", "eager")  # the last two help to locate an error, without any speedup
RECOMPILE_LIMIT = 64  # shared by all parts of policy, critic and reference, with and without gradient


def compile_layers(model: nn.Module, layers: list[nn.Module], backend: str) -> None:
    """Compile every part of the layers at its first call. Names of parameters do not change.

    Args:
        model: Model with the layers.
        layers: Transformer blocks.
        backend: Backend of ``torch.compile``.

    Raises:
        ValueError: If the model is a mixture of experts, whose shapes depend on its routers.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and modules_behind(part, "router_logits"):
            raise ValueError(
                f"expected a dense model with compile=, got {type(part).__name__}, whose experts take other numbers of "
                "tokens in each forward: leave compile= out"
            )
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention_forward))
    for layer in layers:
        for part in layer.children():
            part.compile(backend=backend, dynamic=True, recompile_limit=RECOMPILE_LIMIT)


def has_compilation(model: nn.Module) -> bool:
    """Return True if a part of the model is compiled; deep copies of a compiled model are not."""
    return any(part._compiled_call_impl is not None for part in model.modules())  # noqa: SLF001  no public name


@contextmanager
def without_compilation(model: nn.Module) -> Iterator[None]:
    """Run eagerly inside, in every thread; nothing may train meanwhile."""
    with torch.compiler.set_stance("force_eager") if has_compilation(model) else nullcontext():
        yield
