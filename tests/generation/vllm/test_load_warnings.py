"""Warnings of vLLM's reload: those about computed tensors are dropped, all others are kept."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_rl.generation.vllm.internals import RELOAD, computed_modules, without_load_warnings

LOGGER = logging.getLogger(f"{RELOAD}.layerwise")


class Rotary(nn.Module):
    """Holds a computed table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)


class Router(nn.Module):
    """Holds a buffer that checkpoints contain."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(2))


class Adapted(Rotary):
    """Holds a table, and in some layers a weight."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2)) if weighted else None


def model() -> nn.Module:
    return nn.Sequential(Rotary(), Router(), nn.Linear(2, 2), Adapted(weighted=True), Adapted(weighted=False))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    LOGGER.addHandler(handler)
    yield seen
    LOGGER.removeHandler(handler)


def test_only_modules_whose_tensors_no_checkpoint_contains_are_computed() -> None:
    assert computed_modules(model()) == {"Sequential", "Rotary"}


def test_a_warning_is_dropped_for_computed_modules_alone_and_during_a_reload_alone(lines: list[str]) -> None:
    def warn() -> None:
        for name in ("Rotary", "Router", "Adapted"):
            LOGGER.warning("%s: Failed to load weights", name)
        LOGGER.warning("%s: Excessive loading", "Rotary")

    others = ["Router: Failed to load weights", "Adapted: Failed to load weights", "Rotary: Excessive loading"]
    with without_load_warnings(computed_modules(model())):
        warn()
    assert lines == others
    warn()
    assert lines == [*others, "Rotary: Failed to load weights", *others]
