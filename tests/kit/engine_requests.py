"""Engines that are started without a module, and requests from plain options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lightning_rl import SamplingParams
from lightning_rl.generation import Completion, Engine, Request
from lightning_rl.generation.sessions import Episode, Session


def launch(engine: Engine, model: PreTrainedModel, tokenizer: Any = None) -> None:
    """Start an engine on the device and in the dtype of a model."""
    engine.start(model, tokenizer, device=model.device, dtype=model.dtype)


def request_of(prefix_ids: Sequence[int], sample_id: int = 0, seed: int = 0, **options: Any) -> Request:
    """A request; ``options`` are those of SamplingParams, with no EOS ids unless they are given."""
    sampling = SamplingParams(**dict[str, Any](eos_token_ids=()) | options)
    return Request(prefix_ids=tuple(prefix_ids), sample_id=sample_id, seed=seed, sampling=sampling)


def with_sampling(request: Request, **options: Any) -> Request:
    """The same request, drawn in another way."""
    return replace(request, sampling=replace(request.sampling, **options))


def complete_all(
    engine: Engine, requests: Sequence[Request], answered: Callable[[], object] = lambda: None
) -> dict[int, Completion]:
    """Completions of requests with different sample ids, each of an open sample, in the order of arrival.

    ``answered`` is called after each of them.
    """
    completions = dict[int, Completion]()

    def episode(request: Request) -> Episode:
        async def ask(session: Session) -> None:
            completions[request.sample_id] = await session.complete(request)
            answered()

        return ask

    engine.converse([episode(request) for request in requests], logprobs=True)
    return completions
