"""Engines: token ids in, token ids with log-probabilities and finish reasons out."""

from lightning_rl.generation.canary import Canary, CanaryError
from lightning_rl.generation.engine import (
    Completion,
    Engine,
    EngineError,
    EngineState,
    Request,
    request_seed,
)
from lightning_rl.generation.fake import FakeEngine
from lightning_rl.generation.filters import TokenFilter
from lightning_rl.generation.transformers import TransformersEngine
from lightning_rl.generation.vllm import VLLMEngine
from lightning_rl.generation.vllm_server import VLLMServerEngine

__all__ = [
    "Canary", "CanaryError", "Completion", "Engine", "EngineError", "EngineState", "FakeEngine", "Request",
    "TokenFilter", "TransformersEngine", "VLLMEngine", "VLLMServerEngine", "request_seed",
]  # fmt: skip
