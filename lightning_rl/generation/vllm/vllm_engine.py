"""vLLM engine in the training process, one for each rank."""

import atexit
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.distributed import process_count
from lightning_rl.generation.engine import Capabilities, Engine
from lightning_rl.generation.sessions import Asked, Sessions
from lightning_rl.generation.vllm import internals, vllm_sampling
from lightning_rl.generation.vllm.lora_adapter import Adapter
from lightning_rl.generation.vllm.output_extras import (
    OutputExtras,
    available_extras,
    check_max_logprobs,
    options_for,
)
from lightning_rl.generation.vllm.recorded_modules import record_vllm_modules
from lightning_rl.generation.vllm.vllm_sampling import SCORING, Limits, finish_of, parameters_of, prompt_of
from lightning_rl.generation.vllm.vllm_version import load_vllm, set_batch_invariance
from lightning_rl.generation.vllm.vllm_weights import VLLMWeights
from lightning_rl.generation.weights import weight_stream
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.policy.context_window import context_window, depends_on_batch
from lightning_rl.policy.media import placeholders_of
from lightning_rl.policy.memory import GIB, EngineRoom
from lightning_rl.policy.model import carries_state
from lightning_rl.policy.module_values import ModuleValues
from lightning_rl.policy.processor import processor_of
from lightning_rl.policy.text_model import has_towers
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import Completion, Request
from lightning_rl.utils.arguments import check_bools, check_counts, check_numbers

CPU_CACHE = 2**30  # bytes of KV cache; by default vLLM takes nearly all memory of the machine
GPU_SHARE = 0.4  # share of the GPU's memory, beside the trainer
RUNNING: list["VLLMEngine"] = []  # engines of this process, asleep or not
Value = TypeVar("Value")
HEAD_DTYPE = "float32"  # of the product that computes logits, as in training, for any dtype of the engine
FIXED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # of the sampled distribution
    "generation_config": "vllm",  # ignore the sampling defaults of the checkpoint
    "load_format": "dummy",  # weights come from the trainer
}


class VLLMEngine(Engine):
    """Engine on vLLM (0.32, 0.33) in this process, whose weights are streamed in at each sync.

    It is built at the first sync, after the process group exists, from the policy's configuration; no checkpoint is
    read. It sleeps between the stages of a Trainer, and is closed by ``module.close_engine()``, at the end of the
    process, after an error, and when the engine of another policy starts. Under DDP every rank has a full engine and
    generates without collectives.

    Args:
        dtype: Dtype of the engine's weights; by default the one in which the run computes (bfloat16 under
            ``"bf16-mixed"``), float32 for float64.
        max_model_len: Maximum length of prompt and response together; by default from the policy's configuration.
        lora: ``"merged"`` sends all weights with the adapter merged at each sync; ``"adapter"`` sends the base once
            and then only the adapter, for policies that train nothing else.
        batch_invariant: True for vLLM's batch-invariant mode, in which the log-probabilities of a request do not
            depend on its batch; slower, and NVIDIA GPUs of compute capability 9.0 or later only.
        sleeps: True to release memory after each rollout; by default on a GPU. A CPU build only pauses.
        canary: Check of each sync; None to skip it.
        options: Options of ``vllm.LLM``, such as ``gpu_memory_utilization`` (default 0.4), ``block_size``,
            ``max_num_seqs`` or ``kv_cache_memory_bytes`` (default 1 GiB on a CPU).

    Raises:
        ValueError: If an option would change the meaning of log-probabilities or the source of weights.
    """

    holds_copy = True

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        lora: Literal["merged", "adapter"] = "merged",
        batch_invariant: bool = False,
        sleeps: bool | None = None,
        canary: Canary | bool | None = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._outgoing: VLLMWeights | None = None
        reserved = FIXED.keys() | {"skip_tokenizer_init", "model", "tokenizer", "enable_lora"}
        if refused := sorted(options.keys() & reserved):
            raise ValueError(f"expected no {refused[0]}, because VLLMEngine sets it itself")
        if "enable_sleep_mode" in options:
            raise ValueError(f"expected no enable_sleep_mode: pass sleeps={options['enable_sleep_mode']!r}")
        if lora not in ("merged", "adapter"):
            raise ValueError(f'expected lora="merged" or "adapter", got {lora!r}')
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"expected dtype to be a floating dtype of torch, such as torch.bfloat16, got {dtype!r}")
        check_numbers(above=0, at_most=1, gpu_memory_utilization=options.get("gpu_memory_utilization", GPU_SHARE))
        check_counts(1, optional=True, max_model_len=max_model_len)
        check_bools(batch_invariant=batch_invariant)
        if sleeps is not None:
            check_bools(sleeps=sleeps)
        self.options = options
        self.max_model_len = max_model_len
        self.dtype = self._dtype = dtype
        self.batch_invariant = batch_invariant
        self.sleeps = sleeps
        self.canary = canary_of(canary)
        self._vllm: Any = None
        self._llm: Any = None
        self._model: Any = None
        self._plan: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._extras: OutputExtras | None = None
        self.lora = lora
        self._base_loaded = False  # used with an adapter
        self._asleep: set[str] = set()
        self._constants: list[tuple[Tensor, Tensor]] = []  # of the sleeping model, with their values in main memory
        self._threads: int | None = None  # CPU threads, used on a GPU
        self._purpose: tuple[Any, ...] = ()  # policy and run that vLLM was built for

    @property
    @override
    def capabilities(self) -> Capabilities:  # pyrefly: ignore[bad-override]
        """Capabilities on this machine."""
        return Capabilities(
            filters=True,
            scores=True,
            extras=available_extras(),
            lists_masks=True,
            sleeps=torch.cuda.is_available() if self.sleeps is None else self.sleeps,
            generates_ahead=not torch.cuda.is_available(),  # else its kernels wait for the trainer's
            collective=self._tensor_parallel > 1,
            pictures=True,
            temperatures=vllm_sampling.TEMPERATURES,
        )

    @property
    @override
    def allows_tf32(self) -> bool:  # pyrefly: ignore[bad-override]
        """True on a GPU, where vLLM's Triton attention computes float32 in TF32 regardless of PyTorch's setting."""
        return torch.cuda.is_available()

    @property
    def _tensor_parallel(self) -> int:
        """Number of ranks that share this engine."""
        return self.options.get("tensor_parallel_size", 1)

    @property
    def _executor(self) -> str | None:
        """Executor of vLLM: on several ranks the one that uses the trainer's rank and GPU; None for the default."""
        launched = process_count() > 1 and (torch.cuda.is_available() or self._tensor_parallel > 1)
        return self.options.get("distributed_executor_backend", "external_launcher" if launched else None)

    @override
    def check_memory(self, model: PreTrainedModel, *, dtype: torch.dtype, resident: float) -> None:
        if not torch.cuda.is_available() or "kv_cache_memory_bytes" in self.options:  # the option replaces the share
            return
        share, total = self.options.get("gpu_memory_utilization", GPU_SHARE), torch.cuda.mem_get_info()[1]
        itemsize = (self._dtype or dtype).itemsize / self._tensor_parallel
        weights = sum(weight.numel() for weight in model.parameters()) * itemsize
        room = EngineRoom(total=total, resident=resident, weights=weights, cache=0)  # vLLM checks the cache
        if share > room.largest:
            raise ValueError(
                f"expected room for gpu_memory_utilization={share:g} beside weights and optimizer states of "
                f"{resident / GIB:.1f} GiB, got a GPU of {total / GIB:.1f} GiB: {room.cure}"
            )

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Build vLLM with random weights, unless it sleeps since an earlier stage of the same policy and precision.

        If there will be a process group, it has to exist already. Sleeping engines of other policies are closed.

        Raises:
            ImportError: If vLLM is missing or its version is not supported.
            ValueError: If vLLM would use another GPU than the trainer, or ``batch_invariant`` is not supported.
        """
        if self.batch_invariant:
            set_batch_invariance()
        check_device(device, self._executor)
        purpose = weakref.ref(model), tokenizer, device, dtype, self.extras, self.top_logprobs
        if self._llm is None or self._purpose != purpose:
            self.close()
            for other in [engine for engine in RUNNING if engine._asleep]:  # noqa: SLF001
                other.close()
        self.dtype = self._dtype or (torch.float32 if dtype == torch.float64 else dtype)
        if self._llm is None:
            try:
                self._build(model, tokenizer, device)
            except BaseException:
                self.close()
                raise
            RUNNING.append(self)
        self._purpose, self._base_loaded = purpose, False
        atexit.unregister(self.close)
        atexit.register(self.close)  # before the trainer's process group ends at exit

    @torch.inference_mode(mode=False)  # not those of validation: no later stage can write to inference tensors
    def _build(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-rl-vllm-")  # of tokenizer and adapter
        config = deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]
        config.head_dtype = HEAD_DTYPE
        config.name_or_path = ""
        pictures = processor_of(tokenizer)
        self._outgoing = VLLMWeights(model, lora=self.lora, pictures=pictures is not None)
        if self._outgoing.unties:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        options = {**self._llm_options(model), "skip_tokenizer_init": tokenizer is None}
        processor = None if pictures is None else deepcopy(pictures.processor)
        if processor is not None:  # no norm of pixels in the model, whose constants are random with dummy weights
            options["mm_device_do_normalize"] = False
        elif has_towers(model.config):
            options["language_model_only"] = True
        if tokenizer is not None and processor is None:  # else it is beside the configuration
            tokenizer.save_pretrained(self._folder.name)
            options["tokenizer"] = self._folder.name
        with internals.preserving_process(device):
            self._vllm = load_vllm()
            if options.get("enable_sleep_mode"):
                internals.map_before_free()
            internals.append_one_float()
            internals.SHARED.enter()
            try:
                folder = str(internals.configuration_folder(config, processor))
                if processor is not None:
                    internals.use_processor(folder, processor)
                with internals.SHARED.freeing_workspaces():
                    self._llm = self._vllm.LLM(**options, model=folder)
            except BaseException:
                internals.SHARED.leave()
                raise
            self._threads = torch.get_num_threads() if torch.cuda.is_available() else None
        served = self._llm.llm_engine.model_config
        max_pictures = internals.max_pictures(self._llm.llm_engine.vllm_config)
        if processor is not None:
            vllm_sampling.check_pictures(max_pictures, "VLLMEngine")
        self.max_length = int(served.max_model_len)
        vocabulary = int(served.get_vocab_size())
        self._limits = Limits(
            max_length=self.max_length,
            vocabulary=vocabulary,
            has_tokenizer=tokenizer is not None,
            placeholders=placeholders_of(model.config),
            max_pictures=max_pictures,
        )
        if tokenizer is not None:  # vLLM would choose a class by the type of the model
            self._llm.llm_engine.output_processor.tokenizer = tokenizer
        (self._plan,) = self._llm.apply_model(partial(internals.plan_of, self._llm.llm_engine.vllm_config))
        (self._model,) = self._llm.apply_model(lambda model: model)
        extras = self._llm, self.extras, vocabulary, self.top_logprobs
        self._extras = OutputExtras(*extras) if self.extras else None

    def _llm_options(self, model: PreTrainedModel) -> dict[str, Any]:
        options: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": True, "seed": 0}
        options["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.max_model_len is not None:
            options["max_model_len"] = self.max_model_len
        elif depends_on_batch(model.config):  # vLLM would encode all rows as those beyond the window
            options["max_model_len"] = context_window(model.config)
        if torch.cuda.is_available():
            options |= {"gpu_memory_utilization": GPU_SHARE, "enable_sleep_mode": self.capabilities.sleeps}
        else:
            # A partial prefill makes vLLM set back the request's generator, which CPU generators do not support.
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE, "enable_chunked_prefill": False}
            options["enable_prefix_caching"] = not carries_state(model)  # vLLM caches states at block ends only
        if self._executor is not None:
            options["distributed_executor_backend"] = self._executor
        check_max_logprobs(self.options, self.extras, self.top_logprobs)
        options |= options_for(self.extras, self.top_logprobs)
        options |= {} if self._adapter is None else self._adapter.options
        return {**options, **self.options, **FIXED}

    @property
    def _stream(self) -> VLLMWeights:
        if self._outgoing is None:
            raise RuntimeError("expected a started engine, got one that is not: call start() first")
        return self._outgoing

    @property
    def _adapter(self) -> Adapter | None:
        return None if self._outgoing is None else self._outgoing.adapter

    @override
    def expect(self, weights: weight_stream.Weights) -> None:
        self._plan.compare([(name, tuple(weight.shape)) for name, weight in self._stream(weights)])

    @override
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Stream the weights into vLLM; even after a failure read the whole stream, which other ranks gather too."""
        rest, device, sent = iter(weights), next(self._model.parameters()).device, self._stream
        outgoing = weight_stream.verify(sent(rest), self._plan.expected)
        try:
            if self._base_loaded:
                deque(outgoing, maxlen=0)
            else:
                internals.reload(self._llm, weight_stream.copies(outgoing, self.dtype, device, sent.exact))
        except Exception:
            deque(rest, maxlen=0)
            if not self._base_loaded:
                self._llm.apply_model(partial(internals.recover, self._llm.llm_engine.vllm_config))
            raise
        if self._adapter is not None and self._folder is not None:
            self._adapter.load(self._llm, Path(self._folder.name), self.dtype)
            self._base_loaded = True
        self._wake("kv_cache")
        internals.reset_caches(self._llm)

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        number, (requests, first) = len(requests), self._gather(requests)
        if not requests:
            return []
        for request in requests:
            self._limits.check(request)
        if self._extras is not None:
            self._extras.clear()
        outputs = self._generate(
            [prompt_of(request) for request in requests],
            [self._parameters(request, logprobs=logprobs) for request in requests],
        )
        completions = [
            self._completion(request, output, logprobs=logprobs)
            for request, output in zip(requests, outputs, strict=True)
        ]
        return completions[first : first + number]

    def _completion(self, request: Request, output: Any, *, logprobs: bool) -> Completion:
        """Return the completion of a finished request, aborted if vLLM replaced sampled tokens of its prompt.

        Raises:
            EngineError: If it answers another prompt.
        """
        reads = self._limits.reads(request, output.prompt_token_ids or ())
        row = output.outputs[0]
        scores = torch.from_numpy(np.array(row.logprobs.logprobs, np.float32)) if logprobs else None
        if scores is not None and len(row.token_ids):
            scores = scores[:: len(scores) // len(row.token_ids)]  # the likeliest tokens follow each sampled one
        return Completion(
            token_ids=tuple(row.token_ids),
            logprobs=scores,
            finish=finish_of(request, row.token_ids, row.finish_reason, row.stop_reason)
            if reads
            else FinishReason.ABORT,
            version=self.version,
            sample_id=request.sample_id,
            **({} if self._extras is None else self._extras.of(output)),
        )

    @override
    async def serve(self, sessions: Sessions, *, logprobs: bool) -> None:
        """Add each request to the running batch at once; ranks that share the engine generate in rounds."""
        if self._tensor_parallel > 1:
            await super().serve(sessions, logprobs=logprobs)
            return
        if self._extras is not None:
            self._extras.clear()
        running: dict[str, Asked] = {}
        advance = partial(self._advance, sessions, running, logprobs=logprobs)
        try:
            while running or await sessions.arrival():
                for asked, completion in await sessions.here(advance, sessions.take()):
                    asked.give(completion)
                await sessions.settle()
        finally:
            for asked in running.values():
                self.in_flight.discard(asked.request)

    def _advance(
        self, sessions: Sessions, running: dict[str, Asked], arrived: Sequence[Asked], *, logprobs: bool
    ) -> list[tuple[Asked, Completion]]:
        """Add the requests that have arrived, and generate until one is finished or another arrives."""
        finished = list[tuple[Asked, Completion]]()
        running |= zip(self._add([each.request for each in arrived], logprobs=logprobs), arrived, strict=True)
        while running and not finished:
            for output in self._llm.llm_engine.step():
                if output.finished:
                    asked = running.pop(output.request_id)
                    self.in_flight.discard(asked.request)
                    finished.append((asked, self._completion(asked.request, output, logprobs=logprobs)))
            if sessions.has_arrivals:
                break
        return finished

    @override
    def serving(self) -> AbstractContextManager[object]:
        return self._clean_engine()

    def _add(self, requests: Sequence[Request], *, logprobs: bool) -> list[str]:
        """Add requests to vLLM in one call, which is cheaper than one call each, and return their names."""
        if not requests:
            return []
        self._check_requests(requests)
        for request in requests:
            self._limits.check(request)
        parameters = [self._parameters(request, logprobs=logprobs) for request in requests]
        names = self._llm.enqueue(
            [prompt_of(request) for request in requests],
            parameters,
            use_tqdm=False,
            lora_request=self._lora_request,
        )
        for request in requests:
            self.in_flight.add(request, self.version)
        return [internals.outer_name(name) for name in names]

    @property
    def _lora_request(self) -> Any:
        return None if self._adapter is None else self._adapter.request

    @contextmanager
    def _clean_engine(self) -> Iterator[None]:
        """Compute without the trainer's autocast, on a GPU with the CPU threads that vLLM was built with.

        After a failure all requests are aborted.
        """
        engine, device = self._llm.llm_engine, next(self._model.parameters()).device
        try:
            with torch.autocast(device.type, enabled=False), internals.cpu_threads(self._threads):
                yield
        except BaseException:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    @property
    def _group(self) -> Any:
        """Process group of the ranks that share this engine."""
        return import_module("vllm.distributed.parallel_state").get_tp_group().cpu_group

    @override
    def _across(self, value: Value) -> list[Value]:
        if self._tensor_parallel == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _gather(self, requests: Sequence[Request]) -> tuple[Sequence[Request], int]:
        """Return the requests of all ranks that share this engine, and the index of this rank's first one."""
        if self._tensor_parallel == 1:
            return requests, 0
        parts = self._across(list(requests))
        return [request for part in parts for request in part], sum(map(len, parts[: dist.get_rank(self._group)]))

    def _parameters(self, request: Request, *, logprobs: bool) -> Any:
        options = {} if self._extras is None else self._extras.sampling
        parameters = parameters_of(request, logprobs=logprobs)
        return self._sampling_params({**parameters, "flat_logprobs": logprobs, **options})

    def _sampling_params(self, parameters: Mapping[str, Any]) -> Any:
        return self._vllm.SamplingParams(**(parameters if self._extras is None else self._extras.accept(parameters)))

    def _generate(self, prompts: Sequence[Mapping[str, Any]], parameters: Sequence[Any]) -> list[Any]:
        with self._clean_engine():
            return self._llm.generate(
                list(prompts),
                list(parameters),
                use_tqdm=False,
                lora_request=self._lora_request,
            )

    @override
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        prompts = [{"prompt_token_ids": list(ids)} for ids in rows]
        outputs = self._generate(prompts, [self._sampling_params(SCORING)] * len(rows))
        return [
            torch.tensor(
                [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            )
            for ids, output in zip(rows, outputs, strict=True)
        ]

    @override
    def record_modules(self) -> AbstractContextManager[ModuleValues]:
        """Return the context manager; nothing is recorded unless vLLM runs with ``enforce_eager=True``."""
        return record_vllm_modules(self._llm)

    @override
    def wake(self) -> None:
        """Allocate memory for the weights; the KV cache follows after they are loaded."""
        self._wake("weights")
        super().wake()

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.discard(tag)
            with torch.inference_mode():  # some may be inference tensors
                while tag == "weights" and self._constants:
                    constant, value = self._constants.pop()
                    constant.copy_(value)

    @override
    def sleep(self) -> None:
        """Release weights and KV cache; on a CPU vLLM keeps both."""
        if self._llm is not None and not self._asleep:
            level = 1 if self._base_loaded else 2  # the base of an adapter is sent only once
            if level == 2:
                constants = internals.constants_of(self._model)
                self._constants = [(constant, constant.to("cpu", copy=True)) for constant in constants]
            self._llm.sleep(level=level)
            self._asleep = {"weights", "kv_cache"}
        super().sleep()

    @override
    def end_stage(self) -> None:
        """Sleep until the next stage."""
        self.sleep()
        self.started, self.dtype = False, self._dtype

    @override
    def close(self) -> None:
        """Free weights and KV cache without ending the trainer's process group."""
        super().close()
        self._extras, self._outgoing, self.dtype = None, None, self._dtype
        llm, self._llm, self._plan, self._model, self._asleep = self._llm, None, None, None, set()
        self._constants = []
        atexit.unregister(self.close)
        if self in RUNNING:
            RUNNING.remove(self)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            internals.SHARED.leave()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def check_device(device: torch.device, executor: str | None) -> None:
    """Check that vLLM generates on the trainer's GPU.

    Args:
        device: Device of the trainer.
        executor: ``distributed_executor_backend`` of vLLM; only an external launcher passes the GPU to vLLM.

    Raises:
        ValueError: If it does not; names the variable to set.
    """
    if device.type != "cuda" or not device.index or executor == "external_launcher":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[device.index] if device.index < len(visible) else str(device.index)
    raise ValueError(
        f"expected the trainer on cuda:0, where vLLM generates in a single process, got {device}: set "
        f"CUDA_VISIBLE_DEVICES={name.strip()} and pass devices=1 to the Trainer"
    )
