"""Engines: token ids in, token ids with log-probabilities and finish reasons out."""

from lightning_rl.generation.canary import Canary, CanaryError
from lightning_rl.generation.engine import Completion, Engine, EngineState, Request, request_seed
from lightning_rl.generation.fake import FakeEngine
from lightning_rl.generation.filters import TokenFilter
from lightning_rl.generation.transformers import TransformersEngine
from lightning_rl.generation.vllm import VLLMEngine

__all__ = [
    "Canary", "CanaryError", "Completion", "Engine", "EngineState", "FakeEngine", "Request", "TokenFilter",
    "TransformersEngine", "VLLMEngine", "request_seed",
]  # fmt: skip
