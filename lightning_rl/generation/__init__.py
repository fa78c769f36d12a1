"""Engines: token ids in, token ids with log-probabilities and finish reasons out."""

from lightning_rl.generation.engine import Capabilities, Engine, EngineError, EngineState
from lightning_rl.generation.fake import FakeEngine
from lightning_rl.generation.transformers import TransformersEngine
from lightning_rl.generation.vllm.launched import launched_servers
from lightning_rl.generation.vllm.server_engine import VLLMServerEngine
from lightning_rl.generation.vllm.vllm_engine import VLLMEngine
from lightning_rl.generation.weights.canary import Canary, CanaryError
from lightning_rl.samples import Completion, Request, SamplingParams
from lightning_rl.samples.seeds import request_seed, turn_seed

__all__ = [
    "Canary",
    "CanaryError",
    "Capabilities",
    "Completion",
    "Engine",
    "EngineError",
    "EngineState",
    "FakeEngine",
    "Request",
    "SamplingParams",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "launched_servers",
    "request_seed",
    "turn_seed",
]
