"""The likeliest tokens of vLLM: those of the distribution that it samples from, at its temperature and filters."""

from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.support import callback_of, fit, tiny_module
from kit.vllm_models import a_model, prompts_of, requests_for, synced

from lightning_rl import VLLMEngine
from lightning_rl.callbacks import ScoreCentering
from lightning_rl.corrections import StepTrace
from lightning_rl.generation.sampling_params import RowFilters
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS


def an_engine(k: int | None, **options: Any) -> VLLMEngine:
    small: dict[str, Any] = {"kv_cache_memory_bytes": 2**25, "block_size": 32, "max_num_seqs": 8, "canary": False}
    engine = VLLMEngine(**{**small, **options})
    engine.select_extras(frozenset((TOP_IDS, TOP_LOGPROBS)))
    engine.top_logprobs = k
    return engine


@pytest.mark.parametrize(("k", "filters"), [(3, {}), (None, {"top_k": 5})])
def test_they_are_those_of_the_sampled_distribution(k: int | None, filters: dict[str, Any]) -> None:
    model, engine = a_model("qwen2"), an_engine(k)
    launch(engine, model)
    engine.expect(model.named_parameters())
    requests = requests_for(prompts_of(3), temperature=0.7, **filters)
    for request, completion in zip(requests, synced(engine, model, 0).generate(requests, logprobs=True), strict=True):
        ids = torch.tensor([[*request.prefix_ids, *completion.token_ids]])
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / 0.7).log_softmax(-1)
        if filters:
            kept = RowFilters([request.sampling], scores.device).mask(
                scores, torch.zeros(len(scores), dtype=torch.int64)
            )
            scores = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        number = scores.shape[1] if k is None else k
        top, asked = completion.token_extras[TOP_LOGPROBS], completion.token_extras[TOP_IDS].long()
        assert asked.shape == top.shape == (len(completion.token_ids), number)
        possible = top > -torch.inf
        torch.testing.assert_close(scores.gather(1, asked)[possible], top[possible], atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.topk(number).values[possible], top[possible], atol=1e-4, rtol=0)
        sampled = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(completion.logprobs, sampled, atol=1e-4, rtol=0)
    engine.close()


def test_a_fit_centers_the_scores_of_vllm() -> None:
    """With the policy's weights there is nothing to center but the rounding of two forwards."""
    drifts, engine = list[float](), VLLMEngine(kv_cache_memory_bytes=2**25, block_size=32, max_num_seqs=8)

    def note(trace: StepTrace) -> None:
        views = [microbatch.view for microbatch in trace.microbatches]
        drifts.extend(float(view.require("rollout_kl").abs().max()) for view in views)

    fit(
        tiny_module(policy=a_model, engine=engine),
        callbacks=[ScoreCentering(4), callback_of("noted", observe_step=note)],
    )
    assert drifts and max(drifts) < 1e-5
