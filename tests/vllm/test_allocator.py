"""Allocator of vLLM's sleep mode above a C side that counts: memory that sleeps is mapped before it is freed."""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.fake_vllm import Cuda

from lightning_rl.generation.vllm import internals


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A device of 100 bytes, below ``device_allocator/cumem.py`` of the vLLM that is installed."""
    cuda = Cuda(total=100)
    names = ("init_module", "python_create_and_map", "python_unmap_and_release")
    extension = SimpleNamespace(**{name: getattr(cuda, name) for name in names})
    monkeypatch.setitem(sys.modules, "vllm.cumem_allocator", extension)
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)
    monkeypatch.setattr("vllm.utils.system_utils.find_loaded_library", lambda _: "cumem_allocator.so")
    monkeypatch.setattr("vllm.distributed.device_communicators.cuda_wrapper.CudaRTLibrary", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    yield cuda
    sys.modules.pop("vllm.device_allocator.cumem", None)


@pytest.mark.parametrize("maps", [False, True])
def test_a_block_that_sleeps_is_freed_without_an_error_that_stays(maps: bool, cuda: Cuda) -> None:
    cumem: Any = import_module("vllm.device_allocator.cumem")
    if maps:
        internals.map_before_free()
        internals.map_before_free()  # of a second engine
    allocator = cumem.CuMemAllocator.get_instance()
    cuda.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    blocks = [cuda.my_malloc(40), cuda.my_malloc(50)]
    allocator.sleep(offload_tags=())
    cuda.held_by_others = 50  # so that both do not fit at once
    for block in blocks:
        cuda.my_free(block)
    if not maps:
        assert cuda.error == "invalid argument"
        with pytest.raises(torch.OutOfMemoryError):
            cuda.my_malloc(1)
        return
    assert cuda.error == "" and not cuda.mapped and allocator.get_current_usage() == 0
    cuda.my_malloc(1)


def test_a_segment_that_was_trimmed_is_freed_with_the_others(cuda: Cuda) -> None:
    cumem: Any = import_module("vllm.device_allocator.cumem")
    internals.map_before_free()
    allocator = cumem.CuMemAllocator.get_instance()
    cuda.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    sizes = {cuda.my_malloc(size): size for size in (20, 30, 40)}
    used = dict(zip(sizes, (20, 0, 40), strict=True))
    segments = [{"address": block, "allocated_size": size} for block, size in used.items()]
    allocator._trim(SimpleNamespace(snapshot=lambda: segments))  # noqa: SLF001
    assert cuda.free == 40
    for block in sizes:
        cuda.my_free(block)
    assert not (cuda.error or cuda.raised or cuda.mapped) and allocator.get_current_usage() == 0
