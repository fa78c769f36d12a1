"""Generators: one seed for every global source of random numbers, cheap enough for every step."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(seed: int, device: torch.device) -> None:
    """Seeds Python's, NumPy's and torch's global generators, the last on the CPU and on the device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace for each device: 0.4 ms
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Puts every global generator back to where it was, whoever draws from it inside."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
