"""FakeEngine: scripts, finish reasons, and what it keeps."""

import pytest
import torch
from kit.engine_requests import request_of

from lightning_rl import FakeEngine, FinishReason
from lightning_rl.generation import Completion, Request


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


def test_log_probabilities_are_float32_under_any_default() -> None:
    torch.set_default_dtype(torch.bfloat16)  # as Trainer(precision="bf16-true") does
    try:
        (completion,) = synced(FakeEngine(lambda _: [5, 1])).generate([a_request()], logprobs=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert completion.logprobs is not None and completion.logprobs.dtype == torch.float32


def test_a_scripted_completion_is_passed_on_as_it_is() -> None:
    fault = Completion(token_ids=(5,), logprobs=torch.tensor([-9.0]), finish=FinishReason.ABORT, version=-7)
    (found,) = synced(FakeEngine(lambda _: fault)).generate([a_request()], logprobs=True)
    assert found is fault


def test_the_script_sees_every_request_in_order_and_all_are_kept() -> None:
    engine = synced(FakeEngine(lambda request: [request.sample_id]))
    found = engine.generate([a_request(5), a_request(3)])
    assert [completion.token_ids for completion in found] == [(5,), (3,)]
    engine.generate([a_request(9)])
    assert [request.sample_id for request in engine.requests] == [5, 3, 9]
