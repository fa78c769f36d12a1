"""VLLMEngine: vLLM in the training process, one engine for each rank."""

import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.distributed import process_count
from lightning_rl.generation.engine import Completion, Engine, Request
from lightning_rl.generation.vllm import internals
from lightning_rl.generation.vllm.lora import Adapter
from lightning_rl.generation.vllm.records import Records, options_for, recordable
from lightning_rl.generation.vllm.sampling import CACHING, SCORING, Limits, finish_of, sampling
from lightning_rl.generation.vllm.versions import load_vllm
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.generation.weights.stream import (
    Stream,
    WeightPlan,
    adapter_scales,
    merged_stream,
    owned,
    tied_names,
    with_aliases,
)
from lightning_rl.generation.weights.tracing import recording

CPU_CACHE = 2**30  # bytes of KV cache; without a number vLLM asks for nearly all memory of the machine
GPU_SHARE = 0.4  # of the whole device, beside the trainer
FIXED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
    "generation_config": "vllm",  # not the sampling defaults of the checkpoint
    "load_format": "dummy",  # weights come from the trainer alone
}


class VLLMEngine(Engine):
    """Generates with vLLM (0.32) in this process, from weights that each sync streams into it.

    It is built at the first sync, when the process group exists, from the policy's configuration: no checkpoint is
    read. Under DDP every rank has an engine of its own and there is no collective in generation.

    Args:
        dtype: of the engine's weights; by default that of the policy, float32 for float64.
        max_model_len: most tokens of prompt and response; by default what the policy's configuration says.
        lora: ``"merged"`` adds a policy's adapter to its weights and sends all of them at each sync; ``"adapter"``
            sends the base once and then the adapter alone, for policies of which nothing else trains.
        sleeps: whether it gives its memory back after each rollout; by default on a GPU. A CPU build only pauses.
        canary: proves each sync; None switches it off.
        options: for ``vllm.LLM``, such as ``gpu_memory_utilization`` (0.4 by default), ``block_size``,
            ``max_num_seqs`` or ``kv_cache_memory_bytes`` (1 GiB by default on a CPU).

    Raises:
        ValueError: if an option would change what log-probabilities mean or where weights come from.
    """

    scores = True
    filters = True
    holds_copy = True

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        lora: Literal["merged", "adapter"] = "merged",
        sleeps: bool | None = None,
        canary: Canary | bool | None = True,
        **options: Any,
    ) -> None:
        super().__init__()
        taken = FIXED.keys() | {"skip_tokenizer_init", "model", "tokenizer", "enable_lora"}
        if refused := sorted(options.keys() & taken):
            raise ValueError(f"expected no {refused[0]}, because VLLMEngine sets it itself")
        if lora not in ("merged", "adapter"):
            raise ValueError(f'expected lora="merged" or "adapter", got {lora!r}')
        self.options = options
        self.max_model_len = max_model_len
        self.dtype = dtype
        self._wants_sleep = sleeps
        self.canary = canary_of(canary)
        self._llm: Any = None
        self._vllm: Any = None
        self._model: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._plan: WeightPlan | None = None
        self._records: Records | None = None
        self._lora, self._adapter = lora, cast(Adapter | None, None)
        self._based = False  # whether the base beside the adapter has come
        self._asleep: set[str] = set()

    @property
    @override
    def records(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Expert routes, and on a GPU the tokens that a filter kept."""
        return recordable()

    @property
    @override
    def sleeps(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it gives its memory back after each rollout."""
        return torch.cuda.is_available() if self._wants_sleep is None else self._wants_sleep

    @property
    @override
    def collective(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether ranks draw from one engine together."""
        return self.options.get("tensor_parallel_size", 1) > 1

    @override
    def start(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Builds vLLM, with random weights. The process group has to exist if there will be one.

        Raises:
            ImportError: if vLLM is missing or outside of the window of versions.
        """
        if self._llm is not None:
            raise RuntimeError("expected an engine that is not started, got one that is: close() comes first")
        self._vllm = load_vllm()
        if self.dtype is None:
            self.dtype = torch.float32 if model.dtype == torch.float64 else model.dtype
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-rl-vllm-")
        folder = Path(self._folder.name)
        config = deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        self._adapter = Adapter(model, folder) if self._lora == "adapter" else None
        internals.GROUPS.enter()
        try:
            with internals.undisturbed():
                self._llm = self._vllm.LLM(
                    **self._built_options(), model=str(folder), skip_tokenizer_init=tokenizer is None
                )
        except BaseException:
            internals.GROUPS.leave()
            raise
        configured = self._llm.llm_engine.model_config
        self.limit = int(configured.max_model_len)
        self._limits = Limits(
            tokens=self.limit, vocabulary=int(configured.get_vocab_size()), speaks=tokenizer is not None
        )
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.block = int(cache.block_size) if cache.enable_prefix_caching else 0
        if tokenizer is not None:  # the very one, because vLLM chooses a class by the type of the model
            self._llm.llm_engine.output_processor.tokenizer = tokenizer
        self._tied, self._scales = tied_names(model), adapter_scales(model)
        self._plan = internals.weight_plan(self._llm)
        (self._model,) = self._llm.apply_model(_itself)
        self._records = Records(self._llm, self.recorded, self._limits.vocabulary) if self.recorded else None

    def _built_options(self) -> dict[str, Any]:
        known: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": True, "seed": 0}
        known["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.max_model_len is not None:
            known["max_model_len"] = self.max_model_len
        if torch.cuda.is_available():
            known |= {"gpu_memory_utilization": GPU_SHARE, "enable_sleep_mode": self.sleeps}
        else:
            known |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
        if process_count() > 1 and (torch.cuda.is_available() or self.options.get("tensor_parallel_size", 1) > 1):
            known["distributed_executor_backend"] = "external_launcher"  # rank and device are the trainer's
        known |= options_for(self.recorded) | (self._adapter.options if self._adapter is not None else {})
        return {**known, **self.options, **FIXED}

    @override
    def expect(self, weights: Stream) -> None:
        """Compares names and shapes with the engine's, once.

        Raises:
            ValueError: naming the first tensor that differs.
        """
        sent = [(name, tuple(weight.shape)) for name, weight in self._outgoing(weights)]
        self._known_plan().compare(sent)

    def _outgoing(self, weights: Stream) -> Stream:
        whole = merged_stream(weights, self._scales) if self._adapter is None else self._adapter.apart(weights)
        return with_aliases(whole, self._tied)

    def _known_plan(self) -> WeightPlan:
        if self._plan is None:
            raise RuntimeError("expected start() before weights")
        return self._plan

    @override
    @torch.no_grad()
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams the weights in; if that fails, the stream is read to its end and the engine made loadable again.

        Other ranks take part in gathering every tensor, so leaving early would make them wait for ever.
        """
        plan, rest = self._known_plan(), iter(weights)
        if not plan.expected:
            raise RuntimeError("expected expect() before the first sync, because names are compared before any load")
        dtype = self.dtype or torch.float32
        device = next(self._model.parameters()).device
        outgoing = plan.checked(self._outgoing(rest))
        try:
            if self._based:
                deque(outgoing, maxlen=0)
            else:
                internals.reload(self._llm, owned(outgoing, dtype, device))
        except Exception:
            for _ in rest:
                pass
            if not self._based:
                internals.recover(self._llm)
            raise
        if self._adapter is not None:
            self._adapter.load(self._llm)
            self._based = True
        self._wake("kv_cache")
        internals.reset_prefix_cache(self._llm)

    @override
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Draws one completion for each request.

        Raises:
            ValueError: if a request cannot be kept as it is; none has been sent then.
        """
        asked, (requests, start) = len(requests), self._shared(requests)
        if not requests:
            return []
        for request in requests:
            self._limits.check(request)
        if self._records is not None:
            self._records.clear()
        prompts = [request.prefix_ids for request in requests]
        found = self._generate(prompts, [self._parameters(request, logprobs=logprobs) for request in requests])
        rows = [output.outputs[0] for output in found]
        lengths = [len(row.token_ids) for row in rows]
        scores: list[Tensor | None] = [None] * len(rows)
        if logprobs:
            flat = np.fromiter((score for row in rows for score in row.logprobs.logprobs), np.float32)
            scores = list(torch.from_numpy(flat).split(lengths))
        drawn = [
            Completion(
                token_ids=tuple(row.token_ids), logprobs=score, version=self.version,
                finish=finish_of(request, row.token_ids, row.finish_reason, row.stop_reason),
                **self._extras(output),
            )
            for request, output, row, score in zip(requests, found, rows, scores, strict=True)
        ]  # fmt: skip
        return drawn[start : start + asked]

    def _shared(self, requests: Sequence[Request]) -> tuple[Sequence[Request], int]:
        """The requests of all ranks that share this engine, in one order, and where one's own begin."""
        if self._llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 1:
            return requests, 0
        group = import_module("vllm.distributed.parallel_state").get_tp_group().cpu_group
        parts: list[list[Request]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts, list(requests), group=group)
        return [request for part in parts for request in part], sum(map(len, parts[: dist.get_rank(group)]))

    def _extras(self, output: Any) -> dict[str, Any]:
        return {} if self._records is None else self._records.of(output)

    def _parameters(self, request: Request, *, logprobs: bool) -> Any:
        extra = {} if self._records is None else self._records.sampling
        return self._vllm.SamplingParams(**sampling(request, logprobs=logprobs), flat_logprobs=logprobs, **extra)

    def _generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> list[Any]:
        """Outputs in the order of the prompts; after a failure no request is left behind for the next call."""
        engine = self._llm.llm_engine
        device = next(self._model.parameters()).device
        try:
            with torch.autocast(device.type, enabled=False):
                found = self._llm.generate(
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts], list(parameters), use_tqdm=False,
                    lora_request=None if self._adapter is None else self._adapter.request,
                )  # fmt: skip
        except BaseException:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        if len(found) != len(prompts):
            raise RuntimeError(f"expected {len(prompts)} completions from vLLM, got {len(found)}")
        return found

    @override
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        found = self._generate(rows, [self._vllm.SamplingParams(**SCORING)] * len(rows))
        return [
            torch.tensor(
                [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            )
            for ids, output in zip(rows, found, strict=True)
        ]

    @override
    def trace(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What each layer puts out; on a GPU only with ``enforce_eager=True``, because compiled code calls no hooks."""
        with recording(self._model) as found:
            self.score([ids])
        return found

    @override
    def cached_tokens(self, ids: Sequence[int]) -> int:
        (found,) = self._generate([ids], [self._vllm.SamplingParams(**CACHING)])
        return int(found.num_cached_tokens or 0)

    @override
    def wake(self) -> None:
        """Takes memory for the weights again; that of the KV cache follows once they have come."""
        self._wake("weights")
        super().wake()

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    @override
    def sleep(self) -> None:
        """Gives weights and KV cache back; on a CPU vLLM keeps both, but the state is the same."""
        if self._llm is not None and not self._asleep:
            self._llm.sleep(level=1 if self._based else 2)  # the base of an adapter comes only once
            self._asleep = {"weights", "kv_cache"}
        super().sleep()

    @override
    def close(self) -> None:
        """Frees weights and KV cache, and leaves the trainer's process group alone."""
        super().close()
        self._records, self._adapter, self._based = None, None, False
        llm, self._llm, self._plan, self._model, self._asleep = self._llm, None, None, None, set()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            internals.GROUPS.leave()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        if self.canary is not None:
            self.canary.forget()


def _itself(model: Any) -> Any:
    return model
