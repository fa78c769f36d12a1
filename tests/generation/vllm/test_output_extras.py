"""Conversion of routes and sampling masks from outputs laid out as vLLM's."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.engine_requests import request_of

from lightning_rl.generation.vllm.output_extras import (
    OutputExtras,
    available_extras,
    check_max_logprobs,
    mask_from,
    options_for,
    routes_from,
)
from lightning_rl.generation.vllm.vllm_sampling import SCORING, parameters_of
from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS


def an_output(routes: Any = None, kept: list[list[int]] | None = None) -> Any:
    """A finished request of three prompt tokens and two drawn ones."""
    mask = None if kept is None else SimpleNamespace(token_ids=kept)
    row = SimpleNamespace(token_ids=[4, 5], routed_experts=routes, sampling_mask=mask)
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[row])


def rendered(temperature: float = 1.0, **filters: Any) -> dict[str, Any]:
    """Sampling parameters of a request, as any engine sends them."""
    return parameters_of(request_of([2, 3], temperature=temperature, **filters), logprobs=True)


REQUESTS = {
    "training, top-p": rendered(0.7, top_p=0.95),
    "training, min-p": rendered(min_p=0.1),
    "training, top-k": rendered(top_k=20, top_p=0.9),
    "greedy validation": rendered(0.0),
    "greedy baseline of filtered training": rendered(0.0, top_p=0.95, min_p=0.1),
    "draws of the canary": rendered(0.7),
    "scoring": SCORING,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_engine_that_returns_masks_is_sent_a_temperature_and_a_bound_of_the_same_draw(name: str) -> None:
    asked = REQUESTS[name]
    sent = OutputExtras(None, frozenset((SAMPLING_MASK,)), 10).accept(asked)
    assert sent["temperature"] > 0 and sent["top_k"] > 0  # or vLLM refuses it
    decides = {"temperature", "top_k", "top_p", "min_p"}
    assert {key: sent[key] for key in sent.keys() - decides} == {key: asked[key] for key in asked.keys() - decides}
    if asked["temperature"] == 0:
        assert [sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]] == [1.0, 1, 1.0, 0.0]
    else:
        assert sent == {**asked, "top_k": asked["top_k"] or 10}
    assert OutputExtras(None, frozenset(), 10).accept(asked) == asked


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_routes_are_numbers_of_experts_and_one(kind: Any) -> None:
    given = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(kind)
    found = routes_from(an_output(given))
    assert found.dtype == torch.int16 and found.shape == (4, 2, 3)
    assert torch.equal(found.long() - 1, torch.from_numpy(given.astype(np.int64)))


@pytest.mark.parametrize(("given", "got"), [(None, "none"), (np.zeros((3, 2, 2), np.uint8), "3")])
def test_routes_that_are_not_all_there_are_refused(given: Any, got: str) -> None:
    with pytest.raises(RuntimeError, match=f"expected routes of 4 tokens from vLLM, got {got}"):
        routes_from(an_output(given))


def test_kept_tokens_become_bits() -> None:
    bits = mask_from(an_output(kept=[[0, 4], [5, 8, 9]]), 10)
    assert [row.nonzero()[:, 0].tolist() for row in from_bits(bits, 10)] == [[0, 4], [5, 8, 9]]
    for given, got in ((None, "none"), ([[4]], "1")):
        with pytest.raises(RuntimeError, match=f"expected the kept tokens of 2 tokens from vLLM, got {got}"):
            mask_from(an_output(kept=given), 10)


def test_likeliest_tokens_follow_the_sampled_one() -> None:
    both = frozenset((TOP_IDS, TOP_LOGPROBS))
    output = an_output()
    output.outputs[0].logprobs = SimpleNamespace(
        token_ids=[4, 7, 4, 5, 5, 6], logprobs=[-1.0, -0.5, -1.0, -0.1, -0.1, -math.inf]
    )
    extras = OutputExtras(None, both, 10, 2)
    found = extras.of(output)["token_extras"]
    assert found[TOP_IDS].tolist() == [[7, 4], [5, 6]] and found[TOP_IDS].dtype == torch.int32
    assert found[TOP_LOGPROBS].tolist() == [[-0.5, -1.0], [pytest.approx(-0.1), -math.inf]]
    assert extras.sampling == {"logprobs": 2, "flat_logprobs": True} and options_for(both, 2) == {"max_logprobs": 2}
    assert OutputExtras(None, both, 10).sampling["logprobs"] == 10 and options_for(both) == {"max_logprobs": -1}
    with pytest.raises(RuntimeError, match="expected 3 likeliest tokens of each of 2 tokens from vLLM, got 6 in all"):
        OutputExtras(None, both, 10, 3).of(output)
    check_max_logprobs({}, both, None)
    check_max_logprobs({"max_logprobs": 5}, frozenset(), 8)
    for top, most, needed in ((8, 5, "at least 8, got 5"), (None, 20, "-1 for the whole vocabulary, got 20")):
        with pytest.raises(ValueError, match=f"expected max_logprobs of {needed}: remove it"):
            check_max_logprobs({"max_logprobs": most}, both, top)


def test_on_a_gpu_vllm_is_asked_for_what_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    both, top = frozenset((ROUTES, SAMPLING_MASK)), {TOP_IDS, TOP_LOGPROBS}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available_extras() == {ROUTES, *top} and options_for(both) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert available_extras() == both | top
    assert options_for(both) == {"enable_return_routed_experts": True, "return_sampling_mask": True}
    extras = OutputExtras(None, both, 10)
    found = extras.of(an_output(np.ones((4, 2, 3), np.uint8), [[4], [5, 6]]))
    assert {name: len(one) for name, one in found["token_extras"].items()} == {ROUTES: 2, SAMPLING_MASK: 2}
    assert found["prompt_extras"][ROUTES].shape == (3, 2, 3) and extras.sampling == {}
    assert not found["token_extras"][ROUTES][-1].any() and (found["token_extras"][ROUTES][0] == 2).all()
