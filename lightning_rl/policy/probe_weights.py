"""Weights under which a check of a model's numbers sees every part: without zeros, and in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LOW, HIGH = 0.1, 0.3  # of the values instead of zeros; positive, as a parameter may be under a root


@contextmanager
def probe_weights(module: nn.Module, *, cast: bool = True) -> Iterator[None]:
    """Replace zeros of the parameters by small random values, and half precision by float32, inside the context.

    A gate, an adapter or a residual branch that starts at 0 hides what the layers behind it compute, and half precision
    rounds small effects away. Afterwards all parameters have their bits.

    Args:
        module: Module, sharded or not. Replicas of a shard get equal values.
        cast: True to cast to float32. On an accelerator without enough free memory, the dtype stays.
    """
    parameters = list(module.parameters())
    halves = [one for one in parameters if one.dtype in (torch.float16, torch.bfloat16)]
    casts = [(one, one.data) for one in halves] if cast and _fits(halves) else []
    replaced = list[tuple[Tensor, Tensor, Tensor]]()
    try:
        for parameter, data in casts:
            parameter.data = data.float()
        for parameter in parameters:
            replaced += _replace_zeros(parameter)
        yield
    finally:
        for values, zeros, before in replaced:
            values[zeros] = before
        for parameter, data in casts:
            parameter.data = data


@torch.no_grad()
def _replace_zeros(parameter: nn.Parameter) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Replace the zeros of a parameter, and yield its values, a mask of zeros, and the values before."""
    values: Any = parameter.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    if not values.is_floating_point() or values.element_size() == 1:  # quantized
        return
    zeros = values == 0
    if not bool(zeros.any()):
        return
    before = values[zeros]
    draws = LOW + (HIGH - LOW) * torch.rand(len(before), generator=torch.Generator().manual_seed(0), device="cpu")
    yield values, zeros, before
    values[zeros] = (draws / (values.shape[-1] ** 0.5 if values.dim() > 1 else 1.0)).to(values)


def _fits(parameters: list[nn.Parameter]) -> bool:
    """Return True if there is memory for float32 copies."""
    device = next((one.device for one in parameters if one.is_cuda), None)
    needed = sum(4 * one.numel() for one in parameters)
    return device is None or torch.cuda.mem_get_info(device)[0] > 2 * needed
