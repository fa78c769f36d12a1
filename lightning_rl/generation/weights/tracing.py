"""Tracing: the first layer of the engine that differs from the trainer's, once a canary has found a difference."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LAYER = re.compile(r"(?:^|\.)(embed_tokens|layers\.\d+)$")
EXACT, COARSE = 1e-3, 0.1  # relative differences of a layer's output that rounding may make


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the embedding and every layer of a decoder put out at the first forward inside, as it is, by short names."""
    found: dict[str, Tensor] = {}

    def recorder(name: str) -> Any:
        def record(_module: nn.Module, _given: Any, output: Any) -> None:
            # vLLM's layers return what they add and the stream that it is added to
            parts = [part for part in output if part is not None] if isinstance(output, tuple) else [output]
            if name not in found and parts:
                stream = sum(part.detach().double() for part in parts[:2]) if len(parts) == 2 else parts[0].detach()
                found[name] = torch.as_tensor(stream).flatten(0, -2)

        return record

    names = {name: match[1] for name, _ in model.named_modules() if (match := LAYER.search(name))}
    handles = [model.get_submodule(name).register_forward_hook(recorder(short)) for name, short in names.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_difference(engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor], *, exact: bool) -> str:
    """Says where two recordings part, as a part of a sentence; nothing if they cannot be compared.

    Example:
        >>> same, other = torch.ones(3, 2), torch.zeros(3, 2)
        >>> first_difference({"layers.0": same, "layers.1": other}, {"layers.0": same, "layers.1": same}, exact=True)
        '; the first part that differs is layers.1'
        >>> first_difference({"layers.0": same}, {"layers.0": same}, exact=True)
        '; every layer agrees, so it is the final norm or the head'
    """
    compared = 0
    for name, theirs in trainer.items():
        ours = engine.get(name)
        tokens = 0 if ours is None else min(len(ours), len(theirs))
        if ours is None or not tokens or ours.shape[1:] != theirs.shape[1:]:
            continue
        compared += 1
        expected = theirs[:tokens].double().cpu()
        distance = (ours[:tokens].double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30)
        if not distance <= (EXACT if exact else COARSE):
            return f"; the first part that differs is {name}"
    return "; every layer agrees, so it is the final norm or the head" if compared else ""
