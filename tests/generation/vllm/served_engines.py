"""VLLMServerEngine and Fleet of scripted servers, with a tiny model."""

from pathlib import Path
from typing import Any

import torch
from kit.engine_requests import launch
from kit.scripted_server import KEY, ScriptedServer
from kit.support import tiny_model, tiny_policy
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl import VLLMServerEngine
from lightning_rl.generation.vllm.discovery import ServerList
from lightning_rl.generation.vllm.fleet import Fleet
from lightning_rl.generation.vllm.server_client import ServerClient
from lightning_rl.generation.vllm.storage import WeightFolder
from lightning_rl.generation.vllm.vllm_weights import VLLMWeights


def the_model(seed: int = 0, **options: Any) -> PreTrainedModel:
    return tiny_model("llama", seed, dtype=torch.float32, **options)


def an_engine(*servers: Any, started: bool = True, pushed: bool = True, **options: Any) -> VLLMServerEngine:
    """Return an engine of scripted servers, or of a list of servers, which has weights of version 0 unless told."""
    known: dict[str, Any] = {"api_key": KEY, "canary": False, "patience": 20, "timeout": 20, **options}
    scripted = isinstance(servers[0], ScriptedServer)
    engine = VLLMServerEngine([server.url for server in servers] if scripted else servers[0], **known)
    if started:
        launch(engine, the_model())
        engine.expect(the_model().named_parameters())
    if started and pushed:
        push(engine, 0)
    return engine


def a_fleet(*urls: str, **options: Any) -> Fleet:
    """Return a fleet that is not started, by default of two servers that do not answer."""
    model, urls = tiny_policy(), urls or ("http://127.0.0.1:9", "http://127.0.0.1:10")
    return Fleet(
        urls,
        ServerList(urls, lambda _: None),
        lambda url: ServerClient(url, KEY, 5),
        WeightFolder(Path("unused"), "run"),
        VLLMWeights(model, lora="merged", pictures=False),
        model=model,
        tokenizer=None,
        canary=None,
        **{"patience": 20, **options},
    )


def push(engine: VLLMServerEngine, version: int) -> dict[str, Tensor]:
    """Push weights of a version, and return them."""
    weights: dict[str, Tensor] = dict(the_model(seed=version).named_parameters())
    engine.load_weights(weights.items(), version)
    return weights
