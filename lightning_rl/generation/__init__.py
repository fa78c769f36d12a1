"""Engines: token ids in, token ids with log-probabilities and finish reasons out."""

from lightning_rl.generation.engine import Completion, Engine, EngineState, Request, request_seed
from lightning_rl.generation.fake import FakeEngine
from lightning_rl.generation.transformers import TransformersEngine

__all__ = ["Completion", "Engine", "EngineState", "FakeEngine", "Request", "TransformersEngine", "request_seed"]
