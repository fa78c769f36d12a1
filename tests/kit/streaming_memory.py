"""Memory that the streaming of full weights takes, counted at torch's allocator on every rank.

Run as a script it is one rank: ``streaming_memory.py FOLDER STRATEGIES SHAPE`` measures a model of a shape.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from kit.ranks import STRATEGIES
from kit.support import fit, tiny_module, tiny_policy

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # what engines hold as one module
BACKEND = ("c10d::", "gloo:")
SPLIT = ("fsdp1", "fsdp2", "zero3")


def peaks(act: Callable[[], object]) -> tuple[int, int]:
    """Most bytes of tensors made by ``act`` at any one moment: our own, and the scratch of the backend's collectives.

    Gloo gathers through a temporary buffer, which is gone when the collective returns; NCCL does not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    roots = seen.profiler.kineto_results.experimental_event_tree()
    made = sorted((node for node in _walked(roots) if node.name == "[memory]"), key=lambda node: node.start_time_ns)
    live: dict[int, tuple[bool, int]] = {}
    held, most = [0, 0], [0, 0]
    for node in made:
        address, size = node.extra_fields.ptr, node.extra_fields.alloc_size
        if size > 0:
            live[address] = _within_backend(node), size
        elif address not in live:
            continue  # older than act
        theirs, size = live[address] if size > 0 else (live[address][0], -live.pop(address)[1])
        held[theirs] += size
        most[theirs] = max(most[theirs], held[theirs])
    return most[False], most[True]


def _walked(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _walked(node.children)


def _within_backend(node: Any) -> bool:
    while (node := node.parent) is not None:
        if node.name.startswith(BACKEND):
            return True
    return False


def sizes(model: nn.Module, layer: str = "layers.") -> dict[str, int]:
    """Bytes of the whole model, its largest parameter, what engines fuse, and its largest FSDP unit."""
    found = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    fused: dict[str, int] = {}
    units: dict[str, int] = {}
    for name, size in found.items():
        for number, names in enumerate(FUSED):
            if any(f"{part}.weight" in name for part in names):
                place = f"{name.split(layer)[-1].split('.')[0]} {number}"
                fused[place] = fused.get(place, 0) + size
        unit = name.split(layer)[1].split(".")[0] if layer in name else "root"
        units[unit] = units.get(unit, 0) + size
    parts = {"parameter": max(found.values()), "fused": max(fused.values()), "unit": max(units.values())}
    return {"model": sum(found.values()), **parts}


class _Measured(Exception):  # noqa: N818
    """Ends a fit before its first rollout."""


class _Measures(Callback):
    """Counts several times and takes the lowest: a count can only be too high, where a thread of gloo was the last to
    let go of a tensor, which the profiler does not see. A pause before each value is passed on makes that rare.
    """

    def __init__(self) -> None:
        self.found = (0, 0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        original = type(pl_module.parallel).full_parameters

        def paced(parallel: Any, model: nn.Module, **options: Any) -> Iterator[tuple[str, Tensor]]:
            for name, weight in original(parallel, model, **options):
                time.sleep(0.003)
                yield name, weight
                del weight

        def load() -> None:
            pl_module.options.engine.load_weights(pl_module.run.weights.weights(), 0)  # a sync does more than stream

        pl_module.options.engine.canary = None  # its forward would leave FSDP1's root gathered
        pl_module.run.sync(0)  # starts the engine
        with patch.object(type(pl_module.parallel), "full_parameters", paced):
            self.found = min(peaks(load) for _ in range(3))
        raise _Measured


def measure(strategy: str, shape: dict[str, int]) -> dict[str, int]:
    """Return the bytes for loading all weights into the embedded engine: the maximum over ranks."""
    measures, policy = _Measures(), partial(tiny_policy, **shape)
    with suppress(_Measured):
        fit(
            tiny_module(policy=policy),
            callbacks=[measures],
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=STRATEGIES[strategy](),
        )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measures.found)
    own, scratch = (max(values) for values in zip(*everyone, strict=True))
    return {**sizes(policy()), "own": own, "scratch": scratch}


if __name__ == "__main__":
    for each in sys.argv[2].split(","):
        figures = measure(each, json.loads(sys.argv[3]))
        if dist.get_rank() == 0:
            (Path(sys.argv[1]) / each).write_text(json.dumps(figures))
