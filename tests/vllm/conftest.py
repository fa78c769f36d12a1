"""Tests against the real vLLM: run by ``make test-vllm``, left out where it is not installed."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
from kit.engine_requests import launch
from kit.vllm_models import Starter, weights_of
from transformers import PreTrainedModel

from lightning_rl import VLLMEngine

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
_FOUND = importlib.util.find_spec("vllm")
collect_ignore_glob = ["*"] if _FOUND is None or _FOUND.origin is None else []  # this folder has that name as well


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM are not ours."""
    for item in items:
        if "vllm" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Starter]:
    """Makes engines for models, one for each shape of model in the whole session."""
    known: dict[str, VLLMEngine] = {}

    def start(model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> VLLMEngine:
        key = repr((model.config.to_json_string(), str(model.dtype), tokenizer is None, sorted(options.items())))
        if key not in known:
            if hasattr(model.config, "num_experts") and not any("num_experts" in other for other in known):
                for engine in known.values():
                    engine.close()
                known.clear()
            small: dict[str, Any] = {"kv_cache_memory_bytes": 2**25, "block_size": 32, "max_num_seqs": 64}
            engine = VLLMEngine(canary=False, **{**small, **options})
            launch(engine, model, tokenizer)
            engine.expect(weights_of(model))
            known[key] = engine
        return known[key]

    yield start
    for engine in known.values():
        engine.close()
