"""Access to internals of vLLM: building and closing it beside the trainer, and loading weights.

The code was compared with the releases of :data:`lightning_rl.generation.vllm.vllm_version.WINDOW` and run with the
first. It uses private parts of vLLM, so the window is narrow.
"""

import gc
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from lightning_rl.generation.weights.weight_stream import Shape, WeightPlan, Weights
from lightning_rl.utils.atomic_write import files_of, flush

RELOAD = "vllm.model_executor.model_loader.reload"
FREE_WORKSPACES = "_cuda_clearCublasWorkspaces"
CHANGED = (  # variables set by vLLM and read by the trainer, its compiler and its worker processes
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "TRITON_CACHE_DIR",
    "VLLM_FLOAT32_MATMUL_PRECISION",
)


class SharedState:
    """State of the process that has to last as long as any engine: process groups and cuBLAS workspaces.

    vLLM would destroy the process groups of the trainer and of other engines when one engine shuts down. Lightning
    frees the cuBLAS workspaces at the end of each stage. vLLM's CUDA graphs would still write to that memory, where
    the trainer's weights of the next stage may be. So workspaces are kept, and each graph allocates its own.
    """

    def __init__(self) -> None:
        self.engines = 0  # number of live engines in this process
        self.default = False  # True if vLLM made the default group
        self._cleanup: Callable[[], None] | None = None
        self._destroy: Callable[[], None] | None = None
        self._free_workspaces: Callable[[], None] | None = None

    def enter(self) -> None:
        """Prepare for building an engine."""
        core: Any = import_module("vllm.v1.engine.core")
        parallel_state: Any = import_module("vllm.distributed.parallel_state")
        if self._cleanup is None:
            self._cleanup, core.cleanup_dist_env_and_memory = core.cleanup_dist_env_and_memory, _leave_alone
            # also called by the executor of an external launcher since 0.33
            self._destroy, parallel_state.destroy_model_parallel = parallel_state.destroy_model_parallel, _leave_alone
        if self.engines == 0:
            self.default = self.default or not dist.is_initialized()
            self._free_workspaces = getattr(torch._C, FREE_WORKSPACES, None)  # noqa: SLF001  a build for the CPU has none
            if self._free_workspaces is not None:
                setattr(torch._C, FREE_WORKSPACES, _leave_alone)  # noqa: SLF001
        self.engines += 1

    @contextmanager
    def freeing_workspaces(self) -> Iterator[None]:
        """Free the cuBLAS workspaces before each capture inside: the graph then allocates its own in its pool.

        A workspace of the warm-up would lie outside of the pool, and the graph would only have its address.
        """
        free, begin = self._free_workspaces, torch.cuda.CUDAGraph.capture_begin
        if free is None:
            yield
            return

        @wraps(begin)
        def free_and_begin(graph: torch.cuda.CUDAGraph, *arguments: Any, **options: Any) -> None:
            free()
            begin(graph, *arguments, **options)

        setattr(torch.cuda.CUDAGraph, "capture_begin", free_and_begin)  # noqa: B010  a method
        try:
            yield
        finally:
            setattr(torch.cuda.CUDAGraph, "capture_begin", begin)  # noqa: B010

    def leave(self) -> None:
        """Finish after an engine was closed; the last one destroys the groups that vLLM made."""
        self.engines -= 1
        if self.engines == 0 and self._free_workspaces is not None:
            setattr(torch._C, FREE_WORKSPACES, self._free_workspaces)  # noqa: SLF001
        if self.engines == 0 and self._cleanup is not None and self._destroy is not None and dist.is_initialized():
            default, self.default = self.default, False
            self._destroy()
            if default:
                self._cleanup()


def _leave_alone(*_: Any, **__: Any) -> None:
    """Replacement of functions that would free what is still in use."""


SHARED = SharedState()


def configuration_folder(config: PretrainedConfig, processor: Any = None) -> Path:
    """Write a configuration to a folder in vLLM's cache that is named by its content, and return the folder.

    ``processor`` of pictures is written as well; None for a model of text.

    The path is part of the name under which vLLM looks for compiled code. Processes with one configuration share it.
    """
    cache = Path(import_module("vllm.envs").VLLM_CACHE_ROOT) / "lightning-rl"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as part:
        folder, digest = Path(part) / "new", sha256()
        config.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        flush(folder)
        for file in files_of(folder):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
        target = cache / digest.hexdigest()
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():  # else a process has written it before
                raise
    return target


PROCESSORS: dict[str, Any] = {}  # by the folder of a configuration


def use_processor(folder: str, processor: Any) -> None:
    """Make vLLM read pictures with a processor; from its files it would build one of another backend.

    Args:
        folder: Path of the configuration.
        processor: Processor of transformers that nothing else calls.
    """
    context: Any = import_module("vllm.multimodal.processing.context")
    PROCESSORS[folder], build = processor, context.cached_processor_from_config
    if hasattr(build, "__wrapped__"):
        return

    @wraps(build)
    def find(config: Any, *arguments: Any, **options: Any) -> Any:
        return PROCESSORS.get(config.model) or build(config, *arguments, **options)

    context.cached_processor_from_config = find


def max_pictures(config: Any) -> int | None:
    """Return the largest number of pictures in a prompt; None where vLLM reads them in another way than the model.

    Its attention is causal on a CPU, also within a picture.
    """
    model, device = config.model_config, config.device_config.device_type
    if device == "cpu" and model.is_mm_prefix_lm:
        return None
    return 0 if model.multimodal_config is None else model.multimodal_config.get_limit_per_prompt("image")


def map_before_free() -> None:
    """Make the allocator of vLLM's sleep mode map a block that sleeps or was trimmed before it is freed.

    Freeing a sleeping block would unmap it a second time, which CUDA rejects. The allocator keeps that error, so every
    later allocation fails as if the device were out of memory. A trimmed segment is unmapped as well, and missing in
    the allocator's table, but PyTorch frees it with the pool: that would raise an error, after which no block is freed.
    """
    cumem: Any = import_module("vllm.device_allocator.cumem")
    allocator = cumem.CuMemAllocator
    free, trim = allocator._python_free_callback, allocator._trim  # noqa: SLF001
    if hasattr(free, "__wrapped__"):
        return
    trimmed: dict[int, Any] = {}  # handle of each segment, by its address

    @wraps(free)
    def map_and_free(self: Any, pointer: int) -> Any:
        if pointer in trimmed:
            cumem.create_and_map(trimmed[pointer])
            return trimmed.pop(pointer)
        block = self.pointer_to_data[pointer]
        if block.is_asleep:
            cumem.create_and_map(block.handle)
            block.is_asleep = False
        return free(self, pointer)

    @wraps(trim)
    def trim_and_record(self: Any, pool: Any) -> None:
        before = dict(self.pointer_to_data)
        trim(self, pool)
        trimmed.update({pointer: before[pointer].handle for pointer in before.keys() - self.pointer_to_data.keys()})

    allocator._python_free_callback, allocator._trim = map_and_free, trim_and_record  # noqa: SLF001


def append_one_float() -> None:
    """Make vLLM append one float per token if it returns flat log-probabilities of the sampled tokens alone.

    vLLM appends to six lists. Of such a request, ``FlatLogprobs.logprobs`` is then the only list with elements.
    """
    module: Any = import_module("vllm.v1.engine.logprobs")
    processor, update = module.LogprobsProcessor, module.LogprobsProcessor._update_sample_logprobs  # noqa: SLF001
    if hasattr(update, "__wrapped__"):
        return

    @wraps(update)
    def append(self: Any, logprobs_lists: Any) -> None:
        if self.num_logprobs == 0 and isinstance(self.logprobs, module.FlatLogprobs):
            self.logprobs.logprobs += logprobs_lists.logprobs[:, 0].tolist()  # the sampled token is the first
        else:
            update(self, logprobs_lists)

    processor._update_sample_logprobs = append  # noqa: SLF001


@contextmanager
def preserving_process(device: torch.device) -> Iterator[None]:
    """Restore the global state that building an engine changes: seeds, dtypes, threads, device, kernels of attention.

    Inside, the environment has the variables of a launcher, from which vLLM reads the rank and the trainer's GPU:
    neither Lightning's launcher nor SLURM sets all of them.
    """
    inductor: Any = import_module("torch._inductor.config")  # before vLLM's import, which limits it to one thread
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    current = torch.cuda.current_device() if device.type == "cuda" else None
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    dtype, cudnn = torch.get_default_dtype(), torch.backends.cuda.cudnn_sdp_enabled()
    with (
        torch.random.fork_rng(devices),
        warnings.catch_warnings(),
        preserving_environment(launch_variables(device)),
        preserving_matmul_precision(),
        preserving_triton(),
        inductor.patch(compile_threads=1),  # required by vLLM
    ):
        warnings.simplefilter("ignore")  # warnings of vLLM
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            random.setstate(states[0])
            np.random.set_state(states[1])
            gc.unfreeze()
            if current is not None:
                torch.cuda.set_device(current)


def launch_variables(device: torch.device) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank; none without a process group.

    ``LOCAL_RANK`` is the index of the trainer's GPU; vLLM uses the same.
    """
    if not dist.is_initialized():
        return {}
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank()) if device.index is None else device.index
    return {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(local_rank),
    }


@contextmanager
def preserving_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside, and restore them and those that vLLM changes afterwards."""
    before = {name: os.environ.get(name) for name in (*CHANGED, *variables)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def preserving_matmul_precision() -> Iterator[None]:
    """Make vLLM multiply float32 matrices with the trainer's precision, and restore the setting afterwards."""
    backends: list[Any] = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    by_backend = [backend.fp32_precision for backend in backends]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set per backend, which this global setting cannot express
        precision = None
    if precision is not None:
        os.environ.setdefault("VLLM_FLOAT32_MATMUL_PRECISION", precision)
    try:
        yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        else:
            for backend, value in zip(backends, by_backend, strict=True):
                backend.fp32_precision = value


@contextmanager
def preserving_triton() -> Iterator[None]:
    """Restore the settings of Triton, to which vLLM adds reports of each later compilation, the trainer's too."""
    try:
        knobs: Any = import_module("triton").knobs
    except ImportError:
        yield
        return
    with knobs.autotuning.scope(), knobs.runtime.scope():
        yield


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Set the number of CPU threads inside; None keeps the trainer's."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan_of(config: Any, model: Any) -> WeightPlan:
    """Return the tensors of a model in vLLM before packing, and the mapping from names of a checkpoint to them."""
    layerwise = import_module(f"{RELOAD}.layerwise")
    shapes, buffers = dict[str, Shape](), set[str]()
    for path, module in model.named_modules():
        buffers |= {name for name, _ in module.named_buffers(path, recurse=False)}
        tensors = dict(layerwise.get_layerwise_info(module).restore_metadata[0])
        bias = module._parameters.get("bias")  # noqa: SLF001  missing in the metadata of a reload
        if bias is not None:
            tensors["bias"] = bias
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if hasattr(module, "org_vocab_size"):  # padded rows
                shape = (module.org_vocab_size, *shape[1:])
            place = path.removesuffix(".base_layer")  # a layer that may have an adapter
            shapes[f"{place}.{name}".removeprefix(".")] = shape
    whole = config.parallel_config.tensor_parallel_size == 1
    towers = () if (parts := getattr(model, "get_mm_mapping", None)) is None else tuple(parts().tower_model)
    return WeightPlan(shapes, partial(_target_of, model, {*shapes, *buffers}), buffers, towers, whole=whole)


def _target_of(model: Any, tensors: Collection[str], name: str) -> tuple[str, int] | None:
    """Return the tensor that loads a checkpoint's tensor and its number of parts; None if it is not loaded."""
    for suffix, end in ((".gate_up_proj", "w13_weight"), (".down_proj", "w2_weight")):
        if name.endswith(f".experts{suffix}"):
            stem = name.removesuffix(suffix)
            return next((other for other in tensors if other.startswith(stem) and other.endswith(end)), name), 1
    return _map_name(model, tensors, "", name)


def _map_name(module: nn.Module, tensors: Collection[str], path: str, name: str) -> tuple[str, int] | None:
    """Return the name after the mappers of a module and nested modules with ``load_weights``.

    ``path`` is the path of the module with a dot at its end, ``name`` is relative to it.
    """
    mapper: Any = getattr(module, "hf_to_vllm_mapper", None)
    mapped = (name, None) if mapper is None else mapper._map_name_with_shard(name)  # noqa: SLF001
    if mapped is None:
        return None
    name, shards = mapped
    inner, parts = module, name.split(".")
    for number, part in enumerate(parts[:-1] if path + name not in tensors else (), 1):
        inner = getattr(inner, part, None)
        if callable(getattr(inner, "load_weights", None)):
            return _map_name(
                cast(nn.Module, inner), tensors, f"{path}{'.'.join(parts[:number])}.", ".".join(parts[number:])
            )
    return path + name, len(shards) if isinstance(shards, list) else 1


def constants_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a model in vLLM that are neither parameters nor buffers, such as the weight of 1 of a norm.

    Sleep of level 2 discards them, and no sync sends them. The KV cache is not among them.
    """
    device = next(model.parameters()).device
    values = [value for module in model.modules() for name, value in vars(module).items() if name != "kv_cache"]
    return [value for value in values if isinstance(value, torch.Tensor) and value.device == device]


def reload(llm: Any, weights: Weights) -> None:
    """Load a full set of weights under the names of a checkpoint."""
    llm.apply_model(forget_expert_kernels)
    with without_load_warnings(set[str]().union(*llm.apply_model(computed_modules))):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def computed_modules(model: nn.Module) -> set[str]:
    """Return the classes of modules whose tensors are all computed and never loaded, such as rotary embeddings."""
    computed, loaded = set[str](), set[str]()
    for module in model.modules():
        stored = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set  # noqa: SLF001
        (loaded if stored else computed).add(type(module).__name__)
    return computed - loaded


@contextmanager
def without_load_warnings(classes: Collection[str]) -> Iterator[None]:
    """Drop vLLM's warning, at each reload, that modules of these classes got no weights."""
    logger = logging.getLogger(f"{RELOAD}.layerwise")

    def keep(record: logging.LogRecord) -> bool:
        return record.getMessage() not in {f"{name}: Failed to load weights" for name in classes}

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def reset_caches(llm: Any) -> None:
    """Drop the blocks and the features of pictures that were computed with older weights.

    Raises:
        RuntimeError: If vLLM refuses because a request holds a block.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("expected an idle engine, whose prefix cache can be reset, got running requests")
    llm.llm_engine.reset_encoder_cache()


def recover(config: Any, model: nn.Module) -> None:
    """Make a model in vLLM loadable again after a failed load; its weights are then a mixture."""
    layerwise = import_module(f"{RELOAD}.layerwise")
    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        info.loaded_weights.clear()
        info.load_numel = 0
    with import_module("vllm.config").set_current_vllm_config(config):
        layerwise.finalize_layerwise_reload(model, config.model_config)


def forget_expert_kernels(model: nn.Module) -> None:
    """Drop the expert kernels on a CPU, so that a reload packs the experts again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(model.parameters()).device.type == "cpu":
            method.moe_kernel = None


def outer_name(name: str) -> str:
    """Return the name of a request in vLLM's outputs, from its internal name with a random suffix."""
    return name.rpartition("-")[0]
