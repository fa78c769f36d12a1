"""FakeEngine: scripts, finish reasons, and what it keeps."""

import pytest
import torch
from kit.engine_requests import request_of

from lightning_rl import FakeEngine, FinishReason
from lightning_rl.generation import Request


def a_request(sample_id: int = 0, eos: int = 1) -> Request:
    return request_of((2, 3), sample_id, max_new_tokens=4, eos_token_ids=[eos])


def synced(engine: FakeEngine, version: int = 0) -> FakeEngine:
    engine.load_weights([], version)
    return engine


@pytest.mark.parametrize(
    ("ids", "finish"),
    [
        pytest.param([5, 1], FinishReason.STOP, id="ends-with-eos"),
        pytest.param([5, 6], FinishReason.LENGTH, id="no-eos"),
        pytest.param([1, 5], FinishReason.LENGTH, id="eos-elsewhere"),
        pytest.param([], FinishReason.LENGTH, id="nothing"),
    ],
)
def test_scripted_ids_finish_as_their_last_token_says(ids: list[int], finish: FinishReason) -> None:
    (completion,) = synced(FakeEngine(lambda _: ids)).generate([a_request()])
    assert (completion.token_ids, completion.finish) == (tuple(ids), finish)


def test_log_probabilities_come_only_if_asked_for() -> None:
    engine = synced(FakeEngine(lambda _: [5, 6, 1], logprob=-0.5), version=4)
    (plain,), (scored,) = engine.generate([a_request()]), engine.generate([a_request()], logprobs=True)
    assert plain.logprobs is None and scored.logprobs is not None
    assert scored.logprobs.tolist() == [-0.5] * 3 and scored.logprobs.dtype == torch.float32
    assert plain.version == scored.version == 4
