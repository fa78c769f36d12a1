"""Requests of vLLM: prompts that it rewrites, and limits that it checks late or not at all."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kit.engine_requests import request_of

from lightning_rl.generation import Request
from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.vllm.vllm_sampling import Limits
from lightning_rl.samples import Media

P, END = 13, 1  # a placeholder, a token of the template
LIMITS = Limits(max_length=64, vocabulary=64, has_tokenizer=False, placeholders=(P,), max_pictures=2)
PICTURE = torch.zeros(2, 2, 3, dtype=torch.uint8)


def turns(*parts: Sequence[int], pictures: int = 2) -> Request:
    """A request of the trainer's and the policy's tokens by turns."""
    ids = tuple(token for part in parts for token in part)
    drawn = torch.tensor([bool(number % 2) for number, part in enumerate(parts) for _ in part])
    media = Media(engine_ids=ids, pictures=(PICTURE,) * pictures, items={}, types={}, drawn=drawn)
    return replace(request_of(ids, sample_id=5, max_new_tokens=4), media=media)


REQUEST = turns([2, P, P, 3], [20, 20, 20, 4], [END, 2, P, P])


@pytest.mark.parametrize(
    ("prompt_ids", "reads"),
    [
        pytest.param(REQUEST.prefix_ids, True, id="the request"),
        pytest.param([2, P, P, 3, 22, 4, END, 2, P, P], False, id="merged newlines"),
        pytest.param([2, P, P, 3, END, 2, P, P], False, id="no sampled token"),
        pytest.param([2, P, P, 3, 20, 20, 20, 4, END, 2, P, P, P], None, id="more placeholders"),
        pytest.param([2, P, P, 3, 22, 4, 2, P, P], None, id="another template, too"),
        pytest.param([2, 3, P, P, 22, 4, END, 2, P, P], None, id="another order, too"),
    ],
)
def test_a_sample_whose_sampled_tokens_vllm_rewrites_is_aborted_and_any_other_change_is_an_error(
    prompt_ids: Sequence[int], *, reads: bool | None
) -> None:
    if reads is None:
        with pytest.raises(EngineError, match=r"expected vLLM to read 12 tokens with 4 placeholders for 2 pictures, "):
            LIMITS.reads(REQUEST, prompt_ids)
    else:
        assert LIMITS.reads(REQUEST, prompt_ids) is reads


def test_placeholders_between_sampled_tokens_and_a_picture_are_not_taken_for_sampled_ones() -> None:
    with pytest.raises(EngineError, match="got 5 with 3 for sample 5: serve the model with the trainer's"):
        LIMITS.reads(turns([2], [20], [P, P], pictures=1), [2, 20, P, P, P])


def test_more_pictures_than_vllm_takes_are_named_before_it_gets_them() -> None:
    with pytest.raises(
        ValueError, match=r'at most 2 pictures, the limit_mm_per_prompt\["image"\] of vLLM, got 3 for sample 5'
    ):
        LIMITS.check(turns([2, P, P, P], pictures=3))


def test_a_text_that_vllm_changes_is_an_error() -> None:
    with pytest.raises(EngineError, match="to answer the prompt of the request"):
        LIMITS.reads(request_of([2, 3]), [2, 4])
