"""Expert routes of vLLM: what its routers chose, and how much nearer engine and trainer are when it is replayed."""

from functools import partial
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.routed import check_that_it_falls, many_experts, mismatch
from kit.support import fit, tiny_module
from kit.talks import openings
from kit.vllm_models import EOS, a_model, prompts_of, requests_for, synced

from lightning_rl import VLLMEngine
from lightning_rl.callbacks import RouterReplay
from lightning_rl.environments import converse
from lightning_rl.policy.expert_routes import record_routes
from lightning_rl.rollout import ROUTES


def an_engine(**options: Any) -> VLLMEngine:
    small: dict[str, Any] = {"kv_cache_memory_bytes": 2**25, "block_size": 32, "max_num_seqs": 64, "canary": False}
    return VLLMEngine(**{**small, **options})


def test_every_token_has_the_route_that_the_trainer_would_choose() -> None:
    model, engine = a_model("qwen3_moe"), an_engine(max_num_seqs=6)
    engine.select_extras(frozenset((ROUTES,)))
    launch(engine, model)
    engine.expect(model.named_parameters())
    shared = [list(range(2, 70))] * 4  # whose blocks would come out of the prefix cache
    requests = requests_for([*prompts_of(20), *shared], eos_token_ids=[EOS, *range(20, 40)])
    for version in range(2):
        drawn = list(zip(requests, synced(engine, model, version).generate(requests), strict=True))
        conversations = openings(6)
        converse(conversations, engine)
        turns = [pair for each in conversations for pair in each.pairs]
        assert len(turns) > 30
        for request, completion in [*drawn, *turns]:
            ids = [*request.prefix_ids, *completion.token_ids]
            with record_routes(model) as taken, torch.no_grad():
                model(input_ids=torch.tensor([ids[:-1]]))
                expected = taken().sort(-1).values
            asked, said = completion.prompt_extras[ROUTES], completion.token_extras[ROUTES]
            assert (len(asked), len(said)) == (len(request.prefix_ids), len(completion.token_ids))
            found = torch.cat([asked, said]).sort(-1).values
            assert torch.equal(found[:-1], expected) and not found[-1].any()
    engine.close()


def test_in_bfloat16_the_mismatch_falls() -> None:
    policy = partial(many_experts, torch.bfloat16)
    off = mismatch(policy, engine=an_engine())
    check_that_it_falls(off, mismatch(policy, [RouterReplay()], engine=an_engine()))


def test_in_float32_it_is_at_the_level_of_a_dense_model() -> None:
    on = mismatch(partial(many_experts, torch.float32), [RouterReplay()], engine=an_engine())
    dense = mismatch(partial(many_experts, torch.float32, "qwen3"), engine=an_engine())
    assert float(on.mean()) < 2 * float(dense.mean()) < 1e-4
    assert float(on.max()) < 1e-3


def test_kept_tokens_are_refused_at_setup_where_vllm_returns_none() -> None:
    with pytest.raises(ValueError, match=r'top_p=0.9, .* needs "sampling_mask" .* VLLMEngine does not record'):
        fit(tiny_module(policy=a_model, engine=an_engine(), top_p=0.9))
    assert ROUTES in an_engine().capabilities.extras
