"""Every name of vLLM that the library stands on, read in the sources of the vLLM that is installed.

A release in which one has moved fails here, by name and within a second, and not in the middle of a sync. To read a
release without installing it: ``VLLM_SOURCES=unpacked/vllm pytest tests/vllm/test_touched.py``.
"""

import ast
import dataclasses
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit import fake_vllm

ROOT = Path(__file__).parents[2] / "lightning_rl"
NAMES = {
    "config/vllm.py": (
        "set_current_vllm_config(vllm_config)",
        "VllmConfig.model_config",
        "VllmConfig.device_config",
        "VllmConfig.lora_config",
    ),
    "config/device.py": ("DeviceConfig.device_type",),
    "model_executor/layers/linear.py": ("LinearBase",),
    "model_executor/layers/vocab_parallel_embedding.py": ("VocabParallelEmbedding",),
    "config/lora.py": ("LoRAConfig.max_lora_rank",),
    "config/model.py": (
        "ModelConfig.architecture",
        "ModelConfig.get_vocab_size()",
        "ModelConfig.max_model_len",
        "ModelConfig.logprobs_mode",
        "ModelConfig.max_logprobs",
        "ModelConfig.generation_config",
        "ModelConfig.skip_tokenizer_init",
        "ModelConfig.return_sampling_mask",
        "ModelConfig.head_dtype()",
        "ModelConfig.is_mm_prefix_lm()",
        "ModelConfig.multimodal_config",
    ),
    "config/multimodal.py": ("MultiModalConfig.get_limit_per_prompt(modality)",),
    "config/parallel.py": ("ParallelConfig.tensor_parallel_size", "ParallelConfig.worker_extension_cls"),
    "device_allocator/__init__.py": ("AllocationData.handle", "AllocationData.is_asleep"),
    "device_allocator/cumem.py": (
        "create_and_map(allocation_handle)",
        "CuMemAllocator._python_free_callback(ptr)",
        "CuMemAllocator._trim(pool)",
        "CuMemAllocator.pointer_to_data",
    ),
    "distributed/parallel_state.py": (
        "cleanup_dist_env_and_memory()",
        "destroy_model_parallel()",
        "get_tp_group()",
        "GroupCoordinator.cpu_group",
    ),
    "entrypoints/llm.py": ("LLM",),
    "entrypoints/openai/api_server.py": (),
    "entrypoints/scale_out/token_in_token_out/protocol.py": (
        "GenerateLogProbsContent.top_logprobs",
        "GenerateRequest.model",
        "GenerateRequest.content_parts",
        "GenerateRequest.return_token_ids",
        "GenerateResponseBase.prompt_token_ids",
        "GenerateResponseBase.model",
    ),
    "entrypoints/rl/online/api_router.py": ("pause_generation(mode, clear_cache)",),
    "entrypoints/serve/lora/protocol.py": (
        "LoadLoRAAdapterRequest.lora_name",
        "LoadLoRAAdapterRequest.lora_path",
    ),
    "envs.py": ("VLLM_CACHE_ROOT",),
    "logprobs.py": ("FlatLogprobs.token_ids", "FlatLogprobs.logprobs"),
    "lora/request.py": ("LoRARequest.lora_name", "LoRARequest.lora_int_id", "LoRARequest.lora_path"),
    "model_executor/model_loader/reload/layerwise.py": (
        "get_layerwise_info(layer)",
        "finalize_layerwise_reload(model, model_config)",
    ),
    "model_executor/model_loader/reload/types.py": (
        "LayerReloadingInfo.restore_metadata",
        "LayerReloadingInfo.loaded_weights",
        "LayerReloadingInfo.load_numel",
    ),
    "multimodal/processing/context.py": ("cached_processor_from_config",),
    "outputs.py": (
        "CompletionOutput.token_ids",
        "CompletionOutput.logprobs",
        "CompletionOutput.finish_reason",
        "CompletionOutput.stop_reason",
        "CompletionOutput.routed_experts",
        "CompletionOutput.sampling_mask",
        "CompletionOutput.weight_versions",
    ),
    "sampling_params.py": (
        "SamplingParams.seed",
        "SamplingParams.ignore_eos",
        "SamplingParams.stop_token_ids",
        "SamplingParams.logprobs",
        "SamplingParams.prompt_logprobs",
        "SamplingParams.flat_logprobs",
        "SamplingParams.skip_reading_prefix_cache",
        "SamplingParams.detokenize",
    ),
    "v1/engine/core.py": ("EngineCore.shutdown()", "cleanup_dist_env_and_memory"),
    "v1/engine/llm_engine.py": (
        "LLMEngine.step()",
        "LLMEngine.abort_request(request_ids, internal)",
        "LLMEngine.add_lora(lora_request)",
        "LLMEngine.remove_lora(lora_id)",
        "LLMEngine.reset_encoder_cache()",
    ),
    "v1/engine/logprobs.py": (
        "FlatLogprobs",
        "LogprobsProcessor.num_logprobs",
        "LogprobsProcessor.logprobs",
        "LogprobsProcessor._update_sample_logprobs(logprobs_lists)",
    ),
    "v1/outputs.py": ("LogprobsLists.logprobs",),
    "v1/executor/uniproc_executor.py": ("ExecutorWithExternalLauncher",),
    "v1/worker/gpu/model_runner.py": ("GPUModelRunner.reload_weights(weights_iterator)", "GPUModelRunner.get_model()"),
    "v1/worker/gpu_model_runner.py": ("GPUModelRunner.reload_weights(weights_iterator)", "GPUModelRunner.get_model()"),
    "v1/worker/gpu_worker.py": ("Worker.reload_weights()",),
    "v1/worker/worker_base.py": ("WorkerWrapperBase",),
}
ROUTES = {
    "/collective_rpc": "entrypoints/serve/dev/rpc/api_router.py",
    "/detokenize": "entrypoints/serve/tokenize/api_router.py",
    "/health": "entrypoints/serve/instrumentator/health.py",
    "/inference/v1/generate": "entrypoints/scale_out/token_in_token_out/api_router.py",
    "/pause": "entrypoints/rl/online/api_router.py",
    "/reset_encoder_cache": "entrypoints/serve/dev/cache/api_router.py",
    "/reset_prefix_cache": "entrypoints/serve/dev/cache/api_router.py",
    "/resume": "entrypoints/rl/online/api_router.py",
    "/update_weight_version": "entrypoints/rl/online/api_router.py",
    "/v1/load_lora_adapter": "entrypoints/serve/lora/api_router.py",
    "/version": "entrypoints/serve/instrumentator/basic.py",
    "/weight_info": "entrypoints/rl/online/api_router.py",
}


@cache
def sources() -> Path:
    """The folder of the package."""
    if folder := os.environ.get("VLLM_SOURCES"):
        return Path(folder)
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def names_in(code: str) -> dict[str, set[str] | None]:
    """Return the names that a module and its classes define, with the parameters of functions."""
    found: dict[str, set[str] | None] = {}

    def add(prefix: str, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = {parameter.arg for parameter in parameters}
                found[prefix + node.name] = None if node.args.kwarg is not None else names
                if prefix:  # what a method gives to its object
                    written = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
                    found.update({prefix + part.attr: None for part in written if isinstance(part.ctx, ast.Store)})
            elif isinstance(node, ast.ClassDef):
                found[prefix + node.name] = None
                add(f"{prefix}{node.name}.", node.body)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = None
            elif isinstance(node, ast.If):  # of TYPE_CHECKING
                add(prefix, node.body)
            elif isinstance(node, ast.ImportFrom):
                found.update({prefix + (alias.asname or alias.name): None for alias in node.names})

    add("", ast.parse(code).body)
    return found


@pytest.mark.parametrize("file", NAMES)
def test_every_name_is_where_it_was(file: str) -> None:
    found = names_in((sources() / file).read_text(encoding="utf-8"))
    for text in NAMES[file]:
        name, _, parameters = text.removesuffix(")").partition("(")
        assert name in found, f"{file} has no {name}"
        known = found[name]
        wanted = set(filter(None, parameters.split(", ")))
        assert known is None or wanted <= known, f"{name} of {file} takes {known}, not {wanted}"


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_there(route: str) -> None:
    code = (sources() / ROUTES[route]).read_text(encoding="utf-8")
    assert re.search(rf'(@router\.(get|post)|Mount)\(\s*"{route}"', code), f"{ROUTES[route]} has no {route}"


def test_every_route_and_module_that_the_library_names_is_in_the_list() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "generation" / "vllm").glob("*.py"))
    routes = re.findall(r'_(?:get|post)\(\s*f?"(/[\w/]+)|"(?:GET|POST)",\s*"(/[\w/]+)', code)
    assert {first or second for first, second in routes} == ROUTES.keys()
    files = {file.removesuffix(".py").replace("/", ".") for file in NAMES}
    modules = set(re.findall(r'import_module\(f?"(?:vllm\.|\{RELOAD\}\.)([\w.]+)"\)', code))
    assert modules <= files | {"config", "layerwise"}


def test_a_worker_has_no_name_of_ours_which_would_keep_it_from_starting() -> None:
    ours = set(re.findall(r"_?lightning_rl_\w+", (ROOT / "generation" / "vllm" / "worker_extension.py").read_text()))
    theirs = [names_in(path.read_text(encoding="utf-8")) for path in (sources() / "v1" / "worker").glob("*worker*.py")]
    assert ours and theirs and not [name for names in theirs for name in names if name.rpartition(".")[2] in ours]


def test_the_fake_of_the_tests_knows_no_option_that_vllm_does_not() -> None:
    options = names_in((sources() / "engine/arg_utils.py").read_text(encoding="utf-8"))
    parameters = names_in((sources() / "sampling_params.py").read_text(encoding="utf-8"))
    allocator = names_in((sources() / "device_allocator/cumem.py").read_text(encoding="utf-8"))
    assert [name for name in sorted(fake_vllm.OPTIONS) if f"EngineArgs.{name}" not in options] == []
    fields = [spec.name for spec in dataclasses.fields(fake_vllm.SamplingParams)]
    assert [name for name in fields if f"SamplingParams.{name}" not in parameters] == []
    methods = [name for name, value in vars(fake_vllm.CuMemAllocator).items() if callable(value)]
    assert [name for name in methods if f"CuMemAllocator.{name}" not in allocator] == []
