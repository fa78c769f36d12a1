"""An engine that returns sampling masks refuses requests of other forms: every request of the library has that form.

Masks come from a GPU alone. The check of requests is plain Python, and is that of the real vLLM here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.engine_requests import complete_all
from kit.vllm_models import VOCABULARY, Starter, a_model, prompts_of, requests_for, synced

from lightning_rl import VLLMEngine
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.vllm import output_extras
from lightning_rl.generation.vllm.output_extras import OutputExtras
from lightning_rl.generation.weights.canary import Canary
from lightning_rl.policy.sampling_mask import to_bits
from lightning_rl.rollout import SAMPLING_MASK

TRAINING: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 10 * VOCABULARY},
]


@pytest.fixture
def engine(start_engine: Starter) -> VLLMEngine:
    return synced(start_engine(a_model()), a_model())


def mask(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    """Switches on the check of requests that ``return_sampling_mask`` brings; the masks are made up."""
    config: Any = engine._llm.llm_engine.input_processor.model_config  # noqa: SLF001
    monkeypatch.setattr(config, "return_sampling_mask", True)
    monkeypatch.setattr(engine, "extras", frozenset((SAMPLING_MASK,)))
    monkeypatch.setattr(engine, "_extras", OutputExtras(None, engine.extras, VOCABULARY))
    everything = to_bits(torch.ones(1, VOCABULARY, dtype=torch.bool))
    monkeypatch.setattr(
        output_extras, "mask_from", lambda output, _: everything.repeat(len(output.outputs[0].token_ids), 1)
    )
    return engine


def drawn(engine: VLLMEngine, requests: list[Request]) -> list[tuple[tuple[int, ...], list[float]]]:
    completions: list[Completion] = engine.generate(requests, logprobs=True)
    return [(each.token_ids, [] if each.logprobs is None else each.logprobs.tolist()) for each in completions]


def test_vllm_takes_every_kind_of_request(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    mask(engine, monkeypatch)
    training = [requests_for(prompts_of(2, seed=n), **options) for n, options in enumerate(TRAINING)]
    greedy = requests_for(prompts_of(2), temperature=0.0, top_p=0.95)
    plain = requests_for(prompts_of(2), temperature=1.0)
    kinds = [*training, greedy, plain]
    for requests in kinds:
        assert all(len(tokens) == 20 for tokens, _ in drawn(engine, requests))
    together = [replace(one, sample_id=n) for n, one in enumerate(request for kind in kinds for request in kind)]
    assert [len(completion.token_ids) for completion in complete_all(engine, together).values()] == [20] * len(together)
    (scores,) = engine.score([[5, 6, 7, 8]])
    assert len(scores) == 3 and bool((scores < 0).all())
    canary = Canary()
    for _ in range(2):
        measured = canary.measure(synced(engine, a_model()), vocabulary=VOCABULARY, temperature=0.7, max_length=256)
        assert len(measured.values[""].drawn) == 16 and bool(measured.values[""].fixed.isfinite().all())


def test_a_greedy_answer_takes_the_likeliest_token_with_certainty(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(prompts_of(6), temperature=0.0)
    plain = drawn(engine, requests)
    bounded = drawn(mask(engine, monkeypatch), requests)
    assert [tokens for tokens, _ in bounded] == [tokens for tokens, _ in plain]
    assert {score for _, scores in bounded for score in scores} == {0.0}
    assert all(score < 0 for _, scores in plain for score in scores)


def test_vllm_refuses_requests_without_a_bound(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    mask(engine, monkeypatch)
    monkeypatch.setattr(engine, "_extras", None)
    with pytest.raises(ValueError, match="requires temperature > 0"):
        engine.generate(requests_for([[5]], temperature=0.0))
    with pytest.raises(ValueError, match="requires top_k > 0"):
        engine.generate(requests_for([[5]], top_p=0.95))
    with pytest.raises(ValueError, match="requires temperature > 0"):
        engine.score([[5, 6]])
