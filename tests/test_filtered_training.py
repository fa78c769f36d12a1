"""Training on filtered samples: every log-probability is over the tokens that the engine kept."""

import math
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.rows import Rows
from kit.support import fit, ragged_rollout, recorder, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch import Tensor
from typing_extensions import override

from lightning_rl import FakeEngine, Rollout, SamplingParams, TransformersEngine
from lightning_rl.callbacks import EntropyBonus, ReferenceKL, TeacherKL
from lightning_rl.generation import Request
from lightning_rl.generation.sampling_params import RowFilters
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.packing import pack
from lightning_rl.policy.sampling_mask import from_bits, holds, to_bits
from lightning_rl.rollout import SAMPLING_MASK

VOCABULARY = 16
FILTERS = [SamplingParams(min_p=0.1), SamplingParams(top_k=6, top_p=0.8)]
each = pytest.mark.parametrize("keep", FILTERS, ids=str)


def options_of(keep: SamplingParams) -> dict[str, Any]:
    return {"top_k": keep.top_k, "top_p": keep.top_p, "min_p": keep.min_p}


def synced(model: Any, *names: str) -> TransformersEngine:
    engine = TransformersEngine(max_rows=7)
    engine.select_extras(frozenset(names))
    launch(engine, model)
    engine.load_weights([], 0)
    return engine


def requests_of(number: int, keep: SamplingParams, **options: Any) -> list[Request]:
    known = {"max_new_tokens": 6, "temperature": 0.8, "eos_token_ids": [1], **options_of(keep), **options}
    return [request_of(range(2, 3 + n % 4), n, n, **known) for n in range(number)]


@each
def test_the_engine_draws_from_what_it_says_it_kept(keep: SamplingParams) -> None:
    model = tiny_policy(dtype=torch.float64)
    requests = requests_of(20, keep)
    for request, completion in zip(
        requests, synced(model, SAMPLING_MASK).generate(requests, logprobs=True), strict=True
    ):
        ids, asked = torch.tensor([*request.prefix_ids, *completion.token_ids]), len(request.prefix_ids)
        with torch.no_grad():
            scores = (model(input_ids=ids[None]).logits[0, asked - 1 : -1] / 0.8).log_softmax(-1)
        kept = RowFilters([keep], scores.device).mask(scores, torch.zeros(len(scores), dtype=torch.int64))
        assert torch.equal(from_bits(completion.token_extras[SAMPLING_MASK], VOCABULARY), kept)
        expected = scores.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, ids[asked:, None])[:, 0]
        assert completion.logprobs is not None and not completion.prompt_extras
        torch.testing.assert_close(completion.logprobs, expected)


def test_a_filter_is_of_one_request_alone() -> None:
    model = tiny_policy(dtype=torch.float64)
    plain, filtered = requests_of(6, SamplingParams()), requests_of(6, SamplingParams(top_k=2))
    greedy = requests_of(6, SamplingParams(top_k=2), temperature=0.0)
    mixed = synced(model).generate([*plain, *filtered, *greedy], logprobs=True)
    alone = [*synced(model).generate(plain, logprobs=True), *synced(model).generate(filtered, logprobs=True)]
    alone += synced(model).generate(requests_of(6, SamplingParams(), temperature=0.0), logprobs=True)
    for one, other in zip(mixed, alone, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs is not None and other.logprobs is not None
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-12)


@pytest.mark.nightly
@each
def test_four_steps_over_a_filtered_rollout_stay_finite(keep: SamplingParams) -> None:
    seen: list[Rollout] = []
    figures = Rows()
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, **options_of(keep))
    terms = [ReferenceKL(0.1, as_loss=True), TeacherKL(tiny_policy, 0.1, as_loss=True), EntropyBonus(0.01)]
    fit(module, callbacks=[*terms, recorder(seen)("seen"), figures])
    assert module.global_step == len(figures.rows) == 16
    assert all(math.isfinite(value) for row in figures.rows for value in row.values())
    assert figures.rows[0]["policy/ratio_max"] == 1.0 and figures.rows[-1]["kl/old"] > 1e-6
    for rollout in seen:
        old, drawn = rollout.require("old_logprobs"), rollout.require("rollout_logprobs")
        torch.testing.assert_close(old[rollout.valid_tokens], drawn[rollout.valid_tokens], rtol=0, atol=1e-5)
        assert holds(rollout.token_extras[SAMPLING_MASK], rollout.response_ids)[rollout.valid_tokens].all()
    first = seen[0]
    for other in (first.require("ref_logprobs"), first.token_extras["teacher_logprobs"]):
        same = first.require("old_logprobs")[first.valid_tokens]  # to rounding: kernels mind where weights lie
        torch.testing.assert_close(other[first.valid_tokens], same, rtol=0, atol=1e-5)


def test_what_would_be_kept_now_leaves_drawn_tokens_out() -> None:
    seen: list[Rollout] = []
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, top_p=0.9)
    fit(module, callbacks=[recorder(seen)("seen")], max_steps=4)
    rollout, model = seen[0], module.required_policy.model
    layout = pack(rollout, packed=False)
    with torch.no_grad():
        logits = model(input_ids=layout.input_ids).logits.flatten(0, 1)[layout.source]
    now = RowFilters([SamplingParams(top_p=0.9)], logits.device).mask(
        logits.log_softmax(-1), torch.zeros(len(logits), dtype=torch.int64)
    )
    assert not now.gather(1, layout.targets[:, None]).all()  # so the kept set had to be recorded


def kept_rollout() -> Rollout:
    """Ragged rows with a random set around every token, and nothing in padding."""
    rollout = ragged_rollout(dtype=torch.float64)
    kept = torch.rand(12, 7, VOCABULARY, generator=torch.Generator().manual_seed(0)) > 0.5
    kept = kept.scatter(2, rollout.response_ids[..., None], value=True) & rollout.valid_tokens[..., None]
    return rollout.replace(token_extras={SAMPLING_MASK: to_bits(kept)})


def logprobs_of(rollout: Rollout, *, packed: bool) -> Tensor:
    policy = PolicyModel(tiny_policy(dtype=torch.float64), None, temperature=0.7, packed=packed)
    return policy(pack(rollout, packed=packed)).logprobs.detach()


def test_neither_layout_nor_split_nor_order_changes_a_log_probability() -> None:
    rollout = kept_rollout()
    whole, order = logprobs_of(rollout, packed=True), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(whole, logprobs_of(rollout.replace(token_extras={}), packed=True))
    torch.testing.assert_close(logprobs_of(rollout, packed=False), whole)
    torch.testing.assert_close(logprobs_of(rollout.select(order), packed=True), whole[order])
    for rows in (torch.tensor([6]), torch.tensor([0, 5]), torch.arange(7, 12)):  # row 6 has no response
        torch.testing.assert_close(logprobs_of(rollout.select(rows), packed=True), whole[rows])
    assert not logprobs_of(rollout.padding_rows(2), packed=True).any()


def test_switched_off_it_is_absent() -> None:
    seen: list[Rollout] = []
    plain, off = tiny_module(), tiny_module(top_k=0, top_p=1.0, min_p=0.0)
    fit(plain)
    fit(off, callbacks=[recorder(seen)("seen")])
    assert off.options.engine.extras == frozenset() and all(not rollout.token_extras for rollout in seen)
    first, second = weights_of(plain), weights_of(off)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_a_filter_with_an_engine_that_cannot_say_what_it_kept_is_an_error_at_setup() -> None:
    engine = FakeEngine(lambda _: [2])
    with pytest.raises(ValueError, match=r'top_k=0, top_p=0.9, min_p=0.0 needs "sampling_mask" .* FakeEngine'):
        fit(tiny_module(engine=engine, top_p=0.9))
    engine.load_weights([], 0)
    with pytest.raises(ValueError, match="which FakeEngine ignores"):
        engine.generate(requests_of(1, SamplingParams(top_p=0.9)))


def test_an_engine_that_draws_what_it_did_not_keep_is_found_out() -> None:
    class Careless(TransformersEngine):
        @override
        def generate_batch(self, requests: Any, *, logprobs: bool) -> Any:
            found = super().generate_batch(requests, logprobs=logprobs)
            found[-1].token_extras[SAMPLING_MASK].zero_()
            return found

    with pytest.raises(ValueError, match="expected the sampling mask of Careless to keep every sampled token"):
        fit(tiny_module(engine=Careless(), top_p=0.9))


def test_greedy_evaluation_is_not_filtered() -> None:
    figures = Rows()
    data = tiny_prompts(8, 4, validation=[[2, 3], [5]])
    module = tiny_module(top_k=2, advantages="remax", group_size=1)
    fit(module, data=data, callbacks=[figures])
    assert all(math.isfinite(value) for row in figures.rows for value in row.values())
    assert len(module.generate([[2, 3], [4]], temperature=0.7)) == 2
