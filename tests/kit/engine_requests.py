"""Engines that are started without a module, and requests from plain options."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lightning_rl import SamplingParams
from lightning_rl.generation import Engine, Request


def launch(engine: Engine, model: PreTrainedModel, tokenizer: Any = None) -> None:
    """Start an engine on the device and in the dtype of a model."""
    engine.start(model, tokenizer, device=model.device, dtype=model.dtype)


def request_of(prefix_ids: Sequence[int], sample_id: int = 0, seed: int = 0, **options: Any) -> Request:
    """A request; ``options`` are those of SamplingParams, with no EOS ids unless they are given."""
    sampling = SamplingParams(**{"eos_token_ids": (), **options})
    return Request(prefix_ids=tuple(prefix_ids), sample_id=sample_id, seed=seed, sampling=sampling)


def with_sampling(request: Request, **options: Any) -> Request:
    """The same request, drawn in another way."""
    return replace(request, sampling=replace(request.sampling, **options))
