"""SamplingParams: which tokens top-k, top-p and min-p keep, alone and together."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.generation.sampling_params import RowFilters
from lightning_rl.samples import SamplingParams

CHANCES = [0.4, 0.1, 0.3, 0.15, 0.05]


def kept_of(keep: SamplingParams, chances: list[float]) -> list[int]:
    scores = torch.tensor([chances], dtype=torch.float64).log()
    return RowFilters([keep], scores.device).mask(scores, torch.tensor([0]))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({}, [0, 1, 2, 3, 4], id="off"),
        pytest.param({"top_k": 1}, [0], id="the-likeliest"),
        pytest.param({"top_k": 3}, [0, 2, 3], id="three"),
        pytest.param({"top_k": 9}, [0, 1, 2, 3, 4], id="more-than-there-are"),
        pytest.param({"top_p": 0.01}, [0], id="less-than-the-likeliest"),
        pytest.param({"top_p": 0.69}, [0, 2], id="up-to-the-mass"),
        pytest.param({"top_p": 0.71}, [0, 2, 3], id="the-one-that-crosses-it"),
        pytest.param({"min_p": 0.3}, [0, 2, 3], id="a-share-of-the-likeliest"),
        pytest.param({"min_p": 0.9}, [0], id="none-but-the-likeliest"),
        pytest.param({"min_p": 0.2, "top_k": 3, "top_p": 0.8}, [0, 2], id="each-of-what-the-one-before-left"),
        pytest.param({"top_k": 2, "top_p": 0.6}, [0, 2], id="mass-within-the-two"),
    ],
)
def test_keeps_what_its_options_say(options: dict[str, Any], kept: list[int]) -> None:
    assert kept_of(SamplingParams(**options), CHANCES) == kept


def test_equals_of_the_last_one_are_kept() -> None:
    assert kept_of(SamplingParams(top_k=2), [0.4, 0.2, 0.2, 0.2]) == [0, 1, 2, 3]


@given(seed=st.integers(0, 99), top_k=st.integers(0, 9), top_p=st.floats(0.01, 1), min_p=st.floats(0, 0.99))
def test_any_filter_keeps_the_likeliest_ones(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    scores = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    keep = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = RowFilters([keep], scores.device).mask(scores, torch.tensor([0]))[0]
    assert kept.any() and keep.filters == (keep != SamplingParams())
    assert kept.all() or scores[0, kept].min() >= scores[0, ~kept].max()
    assert top_k == 0 or int(kept.sum()) <= top_k


def sorted_mask(scores: Tensor, keep: SamplingParams) -> Tensor:
    """Return the tokens that one row keeps, by a sort of all tokens in float64."""
    values, order = scores.double().softmax(-1).sort(descending=True, stable=True)
    kept = values >= keep.min_p * values[0]
    if keep.top_k:
        kept &= values >= values[min(keep.top_k, len(values)) - 1]
    mass = torch.where(kept, values, 0.0) / values[kept].sum()
    if keep.top_p < 1:
        kept &= mass.cumsum(0) - mass < keep.top_p
    return torch.zeros_like(kept).scatter(0, order, kept)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_a_large_vocabulary_keeps_what_a_sort_of_it_keeps(spread: float) -> None:
    keeps = [
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=2000, top_p=0.83),
        SamplingParams(top_p=0.5, min_p=0.01),
        SamplingParams(),
    ]
    scores = (spread * torch.randn(len(keeps), 20_000, generator=torch.Generator().manual_seed(3))).log_softmax(-1)
    kept = RowFilters(keeps, scores.device).mask(scores, torch.arange(len(keeps)))
    for row, keep in enumerate(keeps):
        assert (kept[row] != sorted_mask(scores[row], keep)).sum() <= 1  # a token at the border of float32
        assert torch.equal(kept[row], RowFilters([keep], scores.device).mask(scores[[row]], torch.tensor([0]))[0])


def test_greedy_rows_keep_every_token() -> None:
    scores = torch.tensor([CHANCES] * 2).log()
    filters = RowFilters([SamplingParams(top_k=1, temperature=0.0), SamplingParams(top_k=2)], scores.device)
    assert filters.mask(scores, torch.arange(2)).sum(-1).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}"):
        SamplingParams(**options)
