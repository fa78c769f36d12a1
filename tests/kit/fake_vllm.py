"""Fake of vLLM 0.32: the parts that the library touches in its process, as the sources of 0.32 behave.

Weights, sampling and log-probabilities are real, computed by a small transformers model. Memory is counted: on a GPU
(:func:`fake_vllm` with ``gpus=1``) weights and KV cache lie in blocks of an allocator with the error code of
``csrc/cumem_allocator.cpp``, which no later call resets, and memory that sleeps is NaN until it is loaded again. Parts
that are not here (LoRA, several ranks for one engine, stop strings) raise ``NotImplementedError``.
"""

import gc
import itertools
import math
import os
import random
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.generation.vllm import internals, vllm_engine

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
OPTIONS = {  # of EngineArgs, those that a run could set
    "model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "load_format", "dtype", "kv_cache_dtype", "seed",
    "max_model_len", "distributed_executor_backend", "tensor_parallel_size", "enable_expert_parallel", "block_size",
    "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens",
    "max_num_seqs", "max_logprobs", "logprobs_mode", "disable_log_stats", "hf_overrides", "quantization",
    "enforce_eager", "enable_lora", "max_loras", "max_lora_rank", "enable_chunked_prefill", "generation_config",
    "enable_sleep_mode", "enable_cumem_allocator", "enable_return_routed_experts", "return_sampling_mask",
    "compilation_config", "kernel_config", "worker_extension_cls", "async_scheduling", "attention_backend",
}  # fmt: skip
SLEEP_TAGS = {"weights", "kv_cache"}
COLDEST, GREEDY = 1e-2, 1e-5  # _MAX_TEMP and _SAMPLING_EPS


class Cuda:
    """Memory of one GPU behind the C side of vLLM's allocator.

    Args:
        total: bytes of the device.
    """

    def __init__(self, total: int) -> None:
        self.total, self.held_by_others = total, 0
        self.error = ""  # error_code: my_malloc and my_free never reset it
        self.raised = False  # an error of the free callback
        self.mapped: dict[int, int] = {}
        self.tensors: dict[int, Tensor] = {}  # of blocks that hold one
        self.callbacks: tuple[Callable[[Any], None], Callable[[int], Any]] | None = None
        self._pointers = itertools.count(0x7F0000000000, 0x200000)

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self.total - self.held_by_others - sum(self.mapped.values())

    def init_module(self, malloc_callback: Callable[[Any], None], free_callback: Callable[[int], Any]) -> None:
        """Store the callbacks of Python."""
        self.callbacks = malloc_callback, free_callback

    def python_create_and_map(self, *handle: int) -> None:
        """Map memory to a range again; an error is raised and reset."""
        self._create_and_map(handle[1], handle[2])
        self._raise()

    def python_unmap_and_release(self, *handle: int) -> None:
        """Release the memory of a range; an error is raised and reset."""
        self._unmap_and_release(handle[2])
        self._raise()

    def my_malloc(self, size: int, tensor: Tensor | None = None) -> int:
        """Return a new block. After an error that was left behind torch sees a device without memory."""
        assert self.callbacks is not None
        pointer = next(self._pointers)
        if not self.error:
            self.callbacks[0]((0, size, pointer, pointer))
            self._create_and_map(size, pointer)
        if self.error:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes, {self.free} are free.")
        if tensor is not None:
            self.tensors[pointer] = tensor
        return pointer

    def my_free(self, pointer: int) -> None:
        """Free a block; if the callback raises, the block is lost, and so is each later one: the error stays set."""
        assert self.callbacks is not None
        if self.raised:
            return
        try:
            handle = self.callbacks[1](pointer)
        except (RuntimeError, KeyError):
            self.raised = True
            return
        self._unmap_and_release(handle[2])
        self.tensors.pop(pointer, None)

    def _create_and_map(self, size: int, pointer: int) -> None:
        if size > self.free:
            self.error = "out of memory"
        else:
            self.mapped[pointer] = size

    def _unmap_and_release(self, pointer: int) -> None:
        if self.mapped.pop(pointer, None) is None:
            self.error = "invalid argument"
        elif pointer in self.tensors:
            self.tensors[pointer].fill_(math.nan)

    def _raise(self) -> None:
        if self.error:
            error, self.error = self.error, ""
            raise RuntimeError(f"CUDA Error: {error} at cumem_allocator.cpp")


@dataclass
class AllocationData:
    """Block of the allocator, as in ``device_allocator/__init__.py``."""

    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: Tensor | None = None
    is_asleep: bool = False


class CuMemAllocator:
    """Allocator of ``device_allocator/cumem.py``; each fake has a subclass with its own ``instance`` and ``cuda``."""

    instance: ClassVar[Any] = None
    cuda: ClassVar[Cuda]

    @classmethod
    def get_instance(cls) -> Any:
        """Return the one instance of the process."""
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, AllocationData] = {}
        self.current_tag = "default"
        self.python_malloc_callback = self._python_malloc_callback
        self.python_free_callback = self._python_free_callback

    def _python_malloc_callback(self, handle: tuple[int, int, int, int]) -> None:
        self.pointer_to_data[handle[2]] = AllocationData(handle, self.current_tag)

    def _python_free_callback(self, ptr: int) -> tuple[int, int, int, int]:
        return self.pointer_to_data.pop(ptr).handle  # asleep or not

    def _trim(self, pool: Any) -> None:
        raise NotImplementedError("_trim")

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        """Tag what is allocated inside."""
        self.cuda.init_module(self.python_malloc_callback, self.python_free_callback)
        before, self.current_tag = self.current_tag, tag
        try:
            yield
        finally:
            self.current_tag = before

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """Unmap every block, with a copy in main memory of those with some tags."""
        for pointer, data in self.pointer_to_data.items():
            if data.is_asleep:
                continue
            if data.tag in offload_tags and pointer in self.cuda.tensors:
                data.cpu_backup_tensor = self.cuda.tensors[pointer].clone()
            try:
                self.cuda.python_unmap_and_release(*data.handle)
            finally:
                data.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Map blocks of some tags again, and of all tags that no one may leave asleep."""
        for pointer, data in self.pointer_to_data.items():
            if data.is_asleep and (tags is None or data.tag in tags or data.tag not in SLEEP_TAGS):
                self.cuda.python_create_and_map(*data.handle)
                data.is_asleep = False
                if data.cpu_backup_tensor is not None:
                    self.cuda.tensors[pointer].copy_(data.cpu_backup_tensor)
                    data.cpu_backup_tensor = None

    def get_current_usage(self) -> int:
        """Return the bytes of all blocks, asleep or not."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())


@dataclass
class SamplingParams:
    """Sampling parameters that the library sets, checked and changed as in ``sampling_params.py``."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        """Check and change parameters."""
        if 0 < self.temperature < COLDEST:
            self.temperature = COLDEST
        self.seed = None if self.seed == -1 else self.seed
        self.stop, self.stop_token_ids = list(self.stop or []), list(self.stop_token_ids or [])
        checks = {
            "temperature must be in [0, 2]": 0 <= self.temperature <= 2,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (disable), or at least 1": self.top_k >= -1,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "max_tokens must be at least 1": self.max_tokens is None or self.max_tokens >= 1,
            "stop strings are only supported when detokenize is True": not self.stop or self.detokenize,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"{message}, got {self}.")
        if self.temperature < GREEDY:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None


@dataclass
class Running:
    """Request in the scheduler."""

    name: str
    ids: list[int]
    params: SamplingParams
    generator: torch.Generator | None
    length: int  # of its prompt
    prompt_logprobs: list[Any] | None = None
    logprobs: list[float] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)


class LLM:
    """Engine of ``entrypoints/llm.py`` with the engine core, executor and worker below it."""

    def __init__(self, model: str, **options: Any) -> None:
        if unknown := sorted(options.keys() - OPTIONS):
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {unknown[0]!r}")
        self.options, self.folder = options, Path(model)
        self.fake: FakeVLLM = _current()
        self.on_gpu = torch.cuda.is_available()
        self._check_options()
        self.rank, self.device_index = self._distributed_args()
        if not dist.is_initialized():
            store: Any = getattr(dist, "HashStore")()  # noqa: B009  which is not exported
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._change_process()
        self._sleeping: set[str] = set()
        self._saved: dict[str, Tensor] = {}
        self._load_model()
        self._requests: dict[str, Running] = {}
        self._numbers = itertools.count()
        self.llm_engine = self._engine()
        gc.collect()
        gc.freeze()
        built = Built(options, self.dtype, self.rank, self.device_index, self.precision, self.folder)
        self.fake.built.append(built)

    # Construction.

    def _check_options(self) -> None:
        options, on_gpu = self.options, self.on_gpu
        if options.get("dtype", "auto") not in {"auto", *DTYPES}:
            raise ValueError(f"Unknown dtype: {options['dtype']}")
        if not 0 < options.get("gpu_memory_utilization", 0.92) <= 1:
            raise ValueError("gpu_memory_utilization: Input should be greater than 0 and at most 1")
        if options.get("enable_sleep_mode") and not on_gpu:
            raise ValueError("Sleep mode is not supported on current platform.")
        if not on_gpu and (options.get("return_sampling_mask") or options.get("enable_return_routed_experts")):
            raise ValueError("return_sampling_mask and enable_return_routed_experts require Model Runner V2")
        if missing := [n for n in ("enable_lora", "quantization", "worker_extension_cls") if options.get(n)]:
            raise NotImplementedError(missing[0])
        if options.get("tensor_parallel_size", 1) > 1:
            raise NotImplementedError("tensor_parallel_size")
        if options.get("load_format") != "dummy" and not list(self.folder.glob("*.safetensors")):
            raise RuntimeError(f"Cannot find any model weights with `{self.folder}`")
        tokenizer = Path(options.get("tokenizer") or self.folder)
        if not options.get("skip_tokenizer_init") and not (tokenizer / "tokenizer_config.json").exists():
            raise OSError(f"Can't load tokenizer for '{tokenizer}'.")

    def _distributed_args(self) -> tuple[int, int]:
        if self.options.get("distributed_executor_backend") != "external_launcher":
            return 0, 0
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "To get deterministic execution"
        return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    def _change_process(self) -> None:
        """Change the process as workers and engine core do, and on a CPU the platform."""
        random.seed(self.options.get("seed", 0))
        np.random.seed(self.options.get("seed", 0))
        torch.manual_seed(self.options.get("seed", 0))
        self.precision = os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
        if not self.on_gpu:
            os.environ |= {
                "LD_PRELOAD": "libtcmalloc.so",
                "LOCAL_WORLD_SIZE": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
            }
            torch.set_num_threads = lambda _number: None  # pyrefly: ignore[bad-assignment]
            return
        assert self.device_index < self.fake.gpus, f"DP adjusted local rank {self.device_index} is out of bounds"
        if "triton" in sys.modules:  # jit_monitor.py
            knobs: Any = import_module("triton").knobs
            knobs.autotuning.print, knobs.runtime.jit_post_compile_hook = True, print
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(self.fake.cache / "torch_compile_cache")
        torch.set_float32_matmul_precision(self.precision)
        torch.cuda.set_device(self.device_index)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        if not self.options.get("enforce_eager"):
            torch.cuda.CUDAGraph.capture_begin(SimpleNamespace())  # pyrefly: ignore[bad-argument-type]

    def _load_model(self) -> None:
        config: Any = AutoConfig.from_pretrained(self.folder)
        text = config.get_text_config()
        name = self.options.get("dtype", "auto")
        self.dtype: torch.dtype = getattr(config, "dtype", None) or torch.float32 if name == "auto" else DTYPES[name]
        longest = text.max_position_embeddings
        self.max_model_len: int = self.options.get("max_model_len") or longest
        if self.max_model_len > longest:
            raise ValueError(f"User-specified max_model_len ({self.max_model_len}) is greater than derived {longest}")
        self.vocabulary, self._blocks = int(text.vocab_size), list[int]()
        cuda, requested = self.fake.cuda, 0
        if self.on_gpu:
            utilization = self.options.get("gpu_memory_utilization", 0.92)
            requested = math.ceil(cuda.total * utilization)
            if cuda.free < requested:
                raise ValueError(
                    f"Free memory on device ({cuda.free}/{cuda.total}) on startup is less than desired GPU memory "
                    f"utilization ({utilization}, {requested}). Decrease GPU memory utilization"
                )
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self.model = model.eval().requires_grad_(requires_grad=False)
        if not self.on_gpu:
            return
        allocator = self._allocator if self.options.get("enable_sleep_mode") else None
        parameters = list(self.model.parameters())
        weights = sum(weight.numel() * weight.element_size() for weight in parameters)
        cache = self.options.get("kv_cache_memory_bytes") or requested - weights
        if cache <= 0:
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
        if allocator is None:
            cuda.held_by_others += weights + cache
            self._free: Any = weakref.finalize(self, _give_back, cuda, weights + cache)
            return
        assert allocator.get_current_usage() == 0, "CuMem allocator can only be used for one instance per process."
        blocks = self._blocks
        self._free = weakref.finalize(self, _free_blocks, cuda, blocks)
        with allocator.use_memory_pool("weights"):
            for weight in parameters:
                blocks.append(cuda.my_malloc(weight.numel() * weight.element_size(), weight.data))
        with allocator.use_memory_pool("kv_cache"):
            for _ in range(text.num_hidden_layers):
                blocks.append(cuda.my_malloc(cache // text.num_hidden_layers))

    @property
    def _allocator(self) -> Any:
        return import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()

    def _engine(self) -> Any:
        model_config = SimpleNamespace(
            max_model_len=self.max_model_len,
            get_vocab_size=lambda: self.vocabulary,
            return_sampling_mask=bool(self.options.get("return_sampling_mask")),
            dtype=self.dtype,
            is_mm_prefix_lm=False,
            multimodal_config=None,
        )
        cache_config = SimpleNamespace(
            block_size=self.options.get("block_size") or (16 if self.on_gpu else 128),
            enable_prefix_caching=self.options.get("enable_prefix_caching", True),
        )
        vllm_config = SimpleNamespace(
            model_config=model_config,
            cache_config=cache_config,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            device_config=SimpleNamespace(device_type="cuda" if self.on_gpu else "cpu"),
        )
        return SimpleNamespace(
            model_config=model_config,
            vllm_config=vllm_config,
            output_processor=SimpleNamespace(tokenizer=None, request_states=self._requests),
            engine_core=SimpleNamespace(shutdown=self._shutdown),
            step=self._step,
            abort_request=self._abort,
            reset_encoder_cache=lambda: None,
        )

    # Memory.

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Level 1 keeps the weights in main memory, level 2 drops them. A CPU ignores both but for the scheduler."""
        del mode
        self._abort(list(self._requests))
        if "weights" in self._sleeping:
            return
        if self.on_gpu:
            if level == 2:
                self._saved = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            self._allocator.sleep(("weights", "runtime", "cudagraph") if level == 1 else ("runtime", "cudagraph"))
        self._sleeping |= SLEEP_TAGS

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Map memory again, without its contents after level 2."""
        if not self._sleeping or any(tag not in self._sleeping for tag in tags or ()):
            return not self._sleeping
        if self.on_gpu:
            self._allocator.wake_up(tags)
            for name, buffer in self.model.named_buffers() if tags is None or "weights" in tags else ():
                if name in self._saved:
                    buffer.copy_(self._saved[name])
        self._sleeping -= SLEEP_TAGS if tags is None else set(tags)
        return not self._sleeping

    def _check_mapped(self) -> None:
        if any(pointer not in self.fake.cuda.mapped for pointer in self._blocks if pointer in self.fake.cuda.tensors):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _shutdown(self) -> None:
        """Shut down as ``EngineCore.shutdown``, which ends the default process group of the trainer as well."""
        self._requests.clear()
        if self.on_gpu:
            self._free()
        del self.model
        gc.unfreeze()
        import_module("vllm.v1.engine.core").cleanup_dist_env_and_memory()

    # Weights.

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Call a function with the model."""
        return [func(self.model)]

    @torch.no_grad()
    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Reload weights; no other method is known."""
        if method != "reload_weights":
            raise NotImplementedError(method)
        known = self.model.state_dict(keep_vars=True)
        for name, weight in (kwargs or {})["weights_iterator"]:
            if name not in known:
                raise ValueError(f"There is no module or parameter named {name!r} in {type(self.model).__name__}")
            assert known[name].shape == weight.shape, f"Attempted to load weight {weight.shape} into {name}"
            self._check_mapped()
            known[name].copy_(weight)
        return [None]

    def reset_prefix_cache(self) -> bool:
        """Return False if a request holds a block."""
        return not self._requests

    # Requests.

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[Any]:
        """Return outputs in the order of the prompts."""
        queued = self.enqueue(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        names = [name.rpartition("-")[0] for name in queued]
        outputs: dict[str, Any] = {}
        while self._requests:
            outputs |= {output.request_id: output for output in self._step()}
        return [outputs[name] for name in names]

    def enqueue(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[str]:
        """Return the names of the requests, which :meth:`_step` draws."""
        del use_tqdm
        if lora_request is not None:
            raise NotImplementedError("lora_request")
        if len(prompts) != len(sampling_params):
            raise ValueError("The lengths of prompts and params must be the same.")
        added: list[str] = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            self._validate(prompt["prompt_token_ids"], params)
        for prompt, params in zip(prompts, sampling_params, strict=True):
            ids, name = list(prompt["prompt_token_ids"]), f"{next(self._numbers)}-{random.getrandbits(32):08x}"
            generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
            self._requests[name] = Running(name, ids, params, generator, len(ids))
            added.append(name)
        return added

    def _validate(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Validate as ``InputProcessor._validate_params`` and the checks of the prompt."""
        if self.llm_engine.model_config.return_sampling_mask:
            if params.temperature <= 0:
                raise ValueError("sampling distribution replay requires temperature > 0")
            if params.top_k <= 0:
                raise ValueError("sampling distribution replay requires top_k > 0 to bound sampling mask size")
        if params.stop:
            raise NotImplementedError("stop")
        if not ids:
            raise ValueError("The decoder prompt cannot be empty")
        if len(ids) >= self.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than {self.max_model_len}")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ValueError(f"Token id {max(ids)} is out of vocabulary")

    def _abort(self, request_ids: Sequence[str], internal: bool = False) -> None:  # noqa: FBT002  as there
        del internal
        for name in request_ids:
            self._requests.pop(name, None)

    @torch.no_grad()
    def _step(self) -> list[Any]:
        """Draw one token for each request; return those that ended."""
        if self._sleeping:
            raise RuntimeError("the scheduler of an engine that sleeps is paused: requests would never end")
        self._check_mapped()
        if self.on_gpu:
            self.fake.threads_in_step.add(torch.get_num_threads())
        finished: list[Any] = []
        for request in list(self._requests.values()):
            if len(request.ids) == request.length:
                self._prefill(request)
            logits = self.model(input_ids=torch.tensor([request.ids]), use_cache=False).logits[0, -1]
            self._draw(request, logits.float())
            if (reason := self._finish(request)) is not None:
                del self._requests[request.name]
                finished.append(self._output(request, *reason))
        return finished

    def _prefill(self, request: Running) -> None:
        ids, params = request.ids, request.params
        if params.prompt_logprobs is not None:
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            scores = logits.log_softmax(-1)
            each = [
                {token: SimpleNamespace(logprob=float(row[token]))} for row, token in zip(scores, ids[1:], strict=True)
            ]
            request.prompt_logprobs = [None, *each]

    def _draw(self, request: Running, logits: Tensor) -> None:
        """Sample as V2: temperature, min_p, top_k, top_p; log-probabilities are of the tokens that are left."""
        params = request.params
        if params.temperature >= GREEDY:
            logits = logits / params.temperature
            if params.min_p:
                logits = logits.masked_fill(logits < logits.max() + math.log(params.min_p), -math.inf)
            if params.top_k > 0:
                kept = logits.topk(min(params.top_k, len(logits))).values[-1]
                logits = logits.masked_fill(logits < kept, -math.inf)
            if params.top_p < 1:
                ordered, places = logits.sort()
                dropped = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
                dropped[-1] = False
                logits = logits.masked_fill(torch.zeros_like(dropped).scatter(0, places, dropped), -math.inf)
        scores = logits.log_softmax(-1)
        if not bool(scores.max() > -math.inf):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        greedy = params.temperature < GREEDY
        token = int(scores.argmax() if greedy else torch.multinomial(scores.exp(), 1, generator=request.generator))
        request.ids.append(token)
        request.logprobs.append(float(scores[token]))
        if self.llm_engine.model_config.return_sampling_mask:
            request.masks.append(logits.isfinite().nonzero()[:, 0].tolist())

    def _finish(self, request: Running) -> tuple[str, int | None] | None:
        token, params = request.ids[-1], request.params
        assert params.stop_token_ids is not None
        if token in params.stop_token_ids:
            return "stop", token
        drawn = len(request.ids) - request.length
        limit = params.max_tokens is not None and drawn >= params.max_tokens
        return ("length", None) if limit or len(request.ids) >= self.max_model_len else None

    def _output(self, request: Running, reason: str, stop: int | None) -> Any:
        flat = SimpleNamespace(logprobs=request.logprobs)
        row = SimpleNamespace(
            token_ids=request.ids[request.length :],
            logprobs=None if request.params.logprobs is None else flat,
            finish_reason=reason,
            stop_reason=stop,
            routed_experts=self._routes(request.ids[:-1]),
            sampling_mask=SimpleNamespace(token_ids=request.masks) if request.masks else None,
        )
        return SimpleNamespace(
            request_id=request.name.rpartition("-")[0],
            prompt_token_ids=request.ids[: request.length],
            prompt_logprobs=request.prompt_logprobs,
            outputs=[row],
            finished=True,
        )

    def _routes(self, ids: list[int]) -> Any:
        """Return the experts of each token, [tokens, layers, experts of a token], if they were asked for."""
        if not self.options.get("enable_return_routed_experts"):
            return None
        layers = self.model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True).router_logits
        number = int(getattr(self.model.config, "num_experts_per_tok"))  # noqa: B009  of mixtures alone
        return torch.stack([logits.topk(number).indices for logits in layers], 1).numpy()


def _free_blocks(cuda: Cuda, blocks: list[int]) -> None:
    """Free the memory of an engine that ends, or that nothing refers to any longer."""
    while blocks:
        cuda.my_free(blocks.pop(0))


def _give_back(cuda: Cuda, size: int) -> None:
    cuda.held_by_others -= size


@dataclass
class Built:
    """Engine that was constructed, without the engine itself, which may end."""

    options: dict[str, Any]
    dtype: torch.dtype
    rank: int
    device_index: int
    precision: str
    folder: Path


class FakeVLLM:
    """State of the fake for tests.

    Attributes:
        built: each engine that was constructed.
        cuda: the memory of the GPU.
        gpus: how many there are; 0 is a CPU build.
        device: the current one.
        threads_in_step: numbers of CPU threads that engines on a GPU computed with.
        captured: to call at each capture of a CUDA graph.
        cache: folder of vLLM's caches.
    """

    def __init__(self, *, gpus: int, total: int, cache: Path) -> None:
        self.built: list[Built] = []
        self.cuda, self.gpus, self.device = Cuda(total), gpus, 0
        self.threads_in_step: set[int] = set()
        self.cache = cache
        self.captured: Callable[[], object] = lambda: None

    def block_sizes(self) -> list[int]:
        """Return the bytes of each block of the sleep mode's allocator, asleep or not."""
        allocator = import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
        return [block.handle[1] for block in allocator.pointer_to_data.values()]

    def set_device(self, device: Any) -> None:
        """Stand in for ``torch.cuda.set_device``."""
        self.device = device if isinstance(device, int) else torch.device(device).index or 0

    def patches(self) -> list[Any]:
        """Patches of the functions of ``torch.cuda`` that the library calls around an engine."""
        known: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: self.device,
            "set_device": self.set_device,
            "mem_get_info": lambda _device=None: (self.cuda.free, self.cuda.total),
        }
        if not self.gpus:
            return []
        serial = partial(_serial_loader, filesystem)  # torch saves tensors of a GPU through a stream
        patches = [patch.object(torch.cuda, name, value) for name, value in known.items()]
        patches.append(patch.object(torch.cuda.CUDAGraph, "capture_begin", lambda _graph, *_, **__: self.captured()))
        # a build for GPUs would ask its driver whether the optimizer's step is captured
        patches.append(patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None))
        return [*patches, patch.object(filesystem, "_OverlappingCpuLoader", serial)]


def _serial_loader(module: Any, resolve: Callable[[Any], Tensor], **_: Any) -> Any:
    return getattr(module, "_SerialCpuLoader")(resolve)  # noqa: B009  private to torch


class _Finder(MetaPathFinder, Loader):
    """Import the modules of the fake, and change the environment as an import of vLLM does."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.fake = fake
        self.fillers: dict[str, Callable[[ModuleType], None]] = {
            "vllm": self._package,
            "vllm.config": lambda module: setattr(module, "set_current_vllm_config", _nothing),
            "vllm.device_allocator": _empty,
            "vllm.device_allocator.cumem": self._cumem,
            "vllm.distributed": _empty,
            "vllm.distributed.parallel_state": self._parallel_state,
            "vllm.entrypoints": _empty,
            "vllm.envs": lambda module: setattr(module, "VLLM_CACHE_ROOT", str(fake.cache)),
            "vllm.entrypoints.llm": lambda module: setattr(module, "LLM", LLM),
            "vllm.model_executor": _empty,
            "vllm.model_executor.model_loader": _empty,
            "vllm.model_executor.model_loader.reload": _empty,
            "vllm.model_executor.model_loader.reload.layerwise": _layerwise,
            "vllm.v1": _empty,
            "vllm.v1.engine": _empty,
            "vllm.v1.engine.core": self._core,
            "vllm.v1.engine.logprobs": _logprobs,
        }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find modules of the fake."""
        del path, target
        if fullname not in self.fillers:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in self.fillers))

    def exec_module(self, module: ModuleType) -> None:
        """Fill one."""
        self.fillers[module.__name__](module)

    def _package(self, module: ModuleType) -> None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # env_override.py
        if self.fake.gpus:
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # platforms/cuda.py
        module.__dict__.update(__version__="0.32.0", LLM=LLM, SamplingParams=SamplingParams)

    def _cumem(self, module: ModuleType) -> None:
        cuda = self.fake.cuda
        module.__dict__.update(
            CuMemAllocator=type("CuMemAllocator", (CuMemAllocator,), {"instance": None, "cuda": cuda}),
            create_and_map=lambda handle: cuda.python_create_and_map(*handle),
        )

    def _parallel_state(self, module: ModuleType) -> None:
        def destroy_model_parallel() -> None:
            pass

        def cleanup_dist_env_and_memory() -> None:
            if dist.is_initialized():
                dist.destroy_process_group()

        module.__dict__.update(
            destroy_model_parallel=destroy_model_parallel, cleanup_dist_env_and_memory=cleanup_dist_env_and_memory
        )

    def _core(self, module: ModuleType) -> None:
        source = import_module("vllm.distributed.parallel_state")
        module.__dict__["cleanup_dist_env_and_memory"] = source.cleanup_dist_env_and_memory


def _empty(module: ModuleType) -> None:
    del module


def _logprobs(module: ModuleType) -> None:
    methods = {"_update_sample_logprobs": lambda _processor, _lists: None}
    module.__dict__.update(LogprobsProcessor=type("LogprobsProcessor", (), methods), FlatLogprobs=SimpleNamespace)


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def _layerwise(module: ModuleType) -> None:
    """Fill the module of layerwise reloads."""
    infos: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def get_layerwise_info(layer: nn.Module) -> Any:
        if layer not in infos:
            parameters = {name: weight for name, weight in layer.named_parameters(recurse=False) if name != "bias"}
            names = {
                "gate_up_proj": "w13_weight",
                "down_proj": "w2_weight",
            }  # of experts, whose weights have 3 dimensions
            metadata = {
                names.get(name, name) if weight.ndim == 3 else name: weight.detach().to("meta")
                for name, weight in parameters.items()
            }
            infos[layer] = SimpleNamespace(restore_metadata=(metadata, {}), loaded_weights=[], load_numel=0)
        return infos[layer]

    module.__dict__.update(
        get_layerwise_info=get_layerwise_info, finalize_layerwise_reload=lambda _model, _config: None
    )


_ACTIVE: list[FakeVLLM] = []


def _current() -> FakeVLLM:
    return _ACTIVE[-1]


@contextmanager
def fake_vllm(*, gpus: int = 0, total: int = 80 * 2**30) -> Iterator[FakeVLLM]:
    """Import the fake as ``vllm`` inside the context.

    Args:
        gpus: GPUs of the machine. Tensors of the trainer stay on the CPU.
        total: bytes of each GPU.
    """
    outer = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fake = FakeVLLM(gpus=gpus, total=total, cache=cache)
        finder = _Finder(fake)
        for name in outer:
            del sys.modules[name]
        for patched in fake.patches():
            stack.enter_context(patched)
        stack.enter_context(patch.object(internals, "SHARED", internals.SharedState()))
        stack.enter_context(patch.dict(os.environ))
        sys.meta_path.insert(0, finder)
        _ACTIVE.append(fake)
        try:
            yield fake
        finally:
            for running in list(vllm_engine.RUNNING):
                running.close()
            _ACTIVE.pop()
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
                del sys.modules[name]
            sys.modules |= outer
