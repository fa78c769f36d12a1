"""Requests from plain options, and others that are drawn in another way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_rl import Sampling
from lightning_rl.generation import Request


def request_of(prefix_ids: Sequence[int], sample_id: int = 0, seed: int = 0, **options: Any) -> Request:
    """A request; ``options`` are those of Sampling, with no EOS ids unless they are given."""
    sampling = Sampling(**{"eos_token_ids": (), **options})
    return Request(prefix_ids=tuple(prefix_ids), sample_id=sample_id, seed=seed, sampling=sampling)


def with_sampling(request: Request, **options: Any) -> Request:
    """The same request, drawn in another way."""
    return replace(request, sampling=replace(request.sampling, **options))
