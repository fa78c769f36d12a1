"""Values of the modules of vLLM's model in this process, for the comparison with those of the trainer."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from torch import nn

from lightning_rl.generation.vllm.internals import outer_name, reset_caches
from lightning_rl.policy.module_values import ModuleValues, TokenPosition, record_modules


def record_vllm_modules(llm: Any) -> AbstractContextManager[ModuleValues]:
    """Return a context manager that records outputs of modules with parameters, and inputs of linear layers.

    vLLM fuses projections, and adds the residual within norms, so other values have no counterpart in transformers.
    """
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    model: Any = runner.model
    linear = import_module("vllm.model_executor.layers.linear").LinearBase
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
    scaled = any(name.endswith("normalizer") for name, _ in model.named_buffers())  # Gemma scales outside of it
    requests = list[int]()  # numbers, which vLLM counts up
    reset_caches(llm)  # tokens in it pass no module

    def positions(kwargs: Mapping[str, Any]) -> list[TokenPosition]:
        batch, numbered = runner.input_batch, kwargs["positions"].tolist()
        ends = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        rows = [-1] * len(numbered)  # of padding
        numbers = [int(outer_name(name)) for name in batch.req_ids]
        requests.extend(numbers)
        for index, number in enumerate(numbers):
            rows[ends[index] : ends[index + 1]] = [number - min(requests)] * (ends[index + 1] - ends[index])
        return [TokenPosition(row, position) for row, position in zip(rows, numbered, strict=True)]

    def has_output(module: nn.Module) -> bool:
        weighted = next(module.parameters(recurse=False), None) is not None
        return isinstance(module, linear) or (weighted and not (scaled and isinstance(module, embedding)))

    return record_modules(
        model,
        model,
        positions,
        inputs=lambda module: isinstance(module, linear),
        outputs=has_output,
        fused={name: tuple(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()},
    )
