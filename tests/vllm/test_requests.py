"""Requests to vLLM: seeds, ends, limits and failures."""

from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of, with_sampling
from kit.process_state import state_of_process
from kit.support import tiny_tokenizer
from kit.vllm_models import EOS, VOCABULARY, Starter, a_model, prompts_of, requests_for, synced
from kit.vllm_rank import an_engine

from lightning_rl import FinishReason, TransformersEngine, VLLMEngine
from lightning_rl.generation import Completion


def what(completions: list[Completion]) -> list[tuple[tuple[int, ...], list[float]]]:
    return [(c.token_ids, [] if c.logprobs is None else c.logprobs.tolist()) for c in completions]


@pytest.fixture
def engine(start_engine: Starter) -> VLLMEngine:
    return synced(start_engine(a_model()), a_model())


def test_a_sample_depends_neither_on_its_batch_nor_on_order_nor_on_the_cache(engine: VLLMEngine) -> None:
    requests = requests_for(prompts_of(12, 70), temperature=1.0)
    together = what(engine.generate(requests, logprobs=True))
    assert what(engine.generate(requests[::-1], logprobs=True))[::-1] == together, "with a warm cache"
    assert what([engine.generate([request], logprobs=True)[0] for request in requests]) == together
    synced(engine, a_model())
    assert what(engine.generate(requests, logprobs=True)) == together, "with a cold cache"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"prefix_ids": (5,) * 250}, r"within 256 tokens, got 250 \+ 20 for sample 7", id="too-long"),
        pytest.param({"prefix_ids": (5, VOCABULARY)}, r"ids in \[0, 151\), got 5..151 for sample 7", id="unknown-id"),
        pytest.param({"prefix_ids": (5, -1)}, r"got -1..5 for sample 7", id="negative-id"),
        pytest.param({"temperature": 0.005}, r"temperature 0 or within \[0.01, 2\], got 0.005", id="raised-silently"),
        pytest.param({"seed": -1}, "a seed of 31 bits, got -1", id="unseeded-silently"),
        pytest.param({"seed": 2**31}, "a seed of 31 bits, got 2147483648", id="cut-silently"),
        pytest.param({"stop": ("x",)}, "expected a tokenizer, because stop strings", id="stop-without-tokenizer"),
    ],
)
def test_a_request_that_vllm_would_change_is_refused(options: dict[str, Any], message: str, engine: VLLMEngine) -> None:
    known: dict[str, Any] = {"prefix_ids": (5,), "sample_id": 7, "seed": 3, "max_new_tokens": 20}
    good, bad = requests_for([[5, 6]])[0], request_of(**{**known, **options})
    with pytest.raises(ValueError, match=message):
        engine.generate([good, bad])
    assert engine._llm.llm_engine.get_num_unfinished_requests() == 0  # noqa: SLF001
    assert len(engine.generate([good])) == 1


def test_prompts_of_more_tokens_than_vllm_takes_in_a_step_wait_for_the_next(start_engine: Starter) -> None:
    engine = synced(start_engine(a_model(), max_num_batched_tokens=256), a_model())
    requests = requests_for(prompts_of(12, 100), temperature=1.0)
    assert sum(len(request.prefix_ids) for request in requests) > 512
    expected = [engine.generate([request], logprobs=True)[0] for request in requests]
    synced(engine, a_model())
    assert what(engine.generate(requests, logprobs=True)) == what(expected)


def test_a_failed_step_leaves_no_request_behind(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_for(prompts_of(5))
    expected = what(engine.generate(requests, logprobs=True))
    core = engine._llm.llm_engine  # noqa: SLF001
    monkeypatch.setattr(core, "step", lambda: (_ for _ in ()).throw(OSError("lost")))
    with pytest.raises(OSError, match="lost"):
        engine.generate(requests)
    monkeypatch.undo()
    assert core.get_num_unfinished_requests() == 0
    assert what(engine.generate(requests, logprobs=True)) == expected


def test_the_eos_of_model_and_tokenizer_ends_nothing_unless_the_request_says_so(start_engine: Starter) -> None:
    model = a_model(vocab_size=16, eos_token_id=[3, 4])
    engine = synced(start_engine(model, tiny_tokenizer()), model)
    requests = requests_for([[5, 6]] * 20, temperature=1.7)
    whole = engine.generate(requests)
    assert {completion.finish for completion in whole} == {FinishReason.LENGTH}
    assert {EOS, 3, 4} <= {token for completion in whole for token in completion.token_ids}
    for eos in ({EOS}, {4, 9}):
        ended = engine.generate([with_sampling(request, eos_token_ids=sorted(eos)) for request in requests])
        for short, long in zip(ended, whole, strict=True):
            stops = [place for place, token in enumerate(long.token_ids) if token in eos]
            assert short.token_ids == long.token_ids[: stops[0] + 1 if stops else 20]
            assert short.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)


@pytest.mark.parametrize("stop", [("d",), ("b c", "zz"), ("a", "e f"), ("zz",)], ids=str)
def test_stop_strings_end_a_response_where_the_embedded_engine_ends_it(
    stop: tuple[str, ...], start_engine: Starter
) -> None:
    model, tokenizer = a_model(vocab_size=16, eos_token_id=[3, 4]), tiny_tokenizer()
    engine = synced(start_engine(model, tokenizer), model)
    ours = TransformersEngine()
    launch(ours, model, tokenizer)
    ours.load_weights([], 0)
    requests = requests_for([[n % 14 + 2] for n in range(40)], temperature=0.0, stop=stop, eos_token_ids=[EOS])
    found, expected = engine.generate(requests), ours.generate(requests)
    assert [(c.token_ids, c.finish) for c in found] == [(c.token_ids, c.finish) for c in expected]


def test_building_an_engine_leaves_the_process_as_it_was() -> None:
    def state() -> dict[str, Any]:
        names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "TORCHINDUCTOR_COMPILE_THREADS")
        known = state_of_process()
        return {**known, "environment": {name: known["environment"].get(name) for name in names}}

    before, engine = state(), an_engine(canary=False)
    launch(engine, a_model())
    assert state() == before
    engine.close()
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2, "vLLM takes the setter away"
    torch.set_num_threads(1)
