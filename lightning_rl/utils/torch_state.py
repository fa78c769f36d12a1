"""Settings of torch for the whole process or thread, which user code may leave changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICES = ("cpu", "cuda")  # with autocast


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore gradient mode, autocast, default dtype, default device and deterministic algorithms at the end.

    Example:
        >>> with preserve_torch_state():
        ...     torch.set_default_dtype(torch.float64)
        >>> torch.get_default_dtype()
        torch.float32
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    autocast = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in DEVICES}
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.are_deterministic_algorithms_enabled() != strict[0]:
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        for name, (enabled, number) in autocast.items():
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, number)
