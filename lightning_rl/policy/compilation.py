"""Compilation: the parts of a model's layers through ``torch.compile``, in place, so that nothing is called otherwise.

What is compiled are the parts that a decoder layer holds (norms, attention, feed-forward) and not the layer: activation
checkpoints and the hooks of a sharding strategy stay outside, and all layers of a kind share what was compiled. Lengths
are symbols, and the attention itself, whose kernel is compiled already, is called as it is, so other rows make no new
code. Decoding calls the same modules token by token with a cache that grows, and stays as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from lightning_rl.policy.expert_routes import modules_behind
from lightning_rl.policy.packing import PACKED_ATTENTION, packed_attention_forward

BACKENDS = ("inductor", "aot_eager", "eager")  # the others are as fast as no compilation, to find an error
RECOMPILE_LIMIT = 64  # all parts of policy, critic and reference count together, with gradient and without


def compile_layers(model: nn.Module, layers: list[nn.Module], backend: str) -> None:
    """Has every part of some layers compiled when it is first called. Names of parameters stay as they are.

    Args:
        model: that holds the layers.
        layers: its transformer blocks.
        backend: of ``torch.compile``.

    Raises:
        ValueError: for a mixture of experts, whose shapes depend on what its routers choose.
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
    """Whether a part of a model is compiled; a deep copy of a compiled model is not."""
    return any(part._compiled_call_impl is not None for part in model.modules())  # noqa: SLF001  public nowhere


@contextmanager
def without_compilation(model: nn.Module) -> Iterator[None]:
    """Calls a model as if it were not compiled, and so does every thread: it may not train meanwhile."""
    with torch.compiler.set_stance("force_eager") if has_compilation(model) else nullcontext():
        yield
