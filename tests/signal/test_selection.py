"""Selections of tokens over a whole step: by hand, under ties, in any order, and drawn without a generator."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.lockstep import in_lockstep
from torch import Tensor
from torch.testing import assert_close

from lightning_rl.signal.selection import covariances, largest, shuffled_keys, smallest_with_mean_below

NAN = math.nan
fixed = settings(max_examples=25, derandomize=True, database=None, deadline=None)


def parts(values: list[list[float]]) -> list[Tensor]:
    return [torch.tensor([own], dtype=torch.float64) for own in values]


def masks(values: list[list[int]]) -> list[Tensor]:
    return [torch.tensor([own], dtype=torch.bool) for own in values]


def test_covariances_are_shares_of_the_covariance_of_the_step() -> None:
    logprobs, advantages = parts([[-1.0, -3.0, NAN], [-5.0]]), parts([[2.0, 1.0, NAN], [-3.0]])
    found = covariances(logprobs, advantages, masks([[1, 1, 0], [1]]))
    assert [one.tolist() for one in found] == [[[4.0, 0.0, 0.0]], [[6.0]]]  # means -3 and 0
    assert all(one.dtype == torch.float64 and not one.requires_grad for one in found)
    table = torch.tensor([[-1.0, -3.0, -5.0], [2.0, 1.0, -3.0]], dtype=torch.float64)
    assert_close(torch.cat(found, 1).sum() / 3, torch.cov(table, correction=0)[0, 1])


@pytest.mark.parametrize(
    ("number", "chosen"),
    [
        (0, [[0, 0, 0], [0, 0]]),
        (1, [[0, 1, 0], [0, 0]]),
        (2, [[1, 1, 0], [1, 0]]),  # a tie at the second place: both
        (3, [[1, 1, 0], [1, 0]]),
        (4, [[1, 1, 0], [1, 1]]),
        (99, [[1, 1, 0], [1, 1]]),
    ],
)
def test_the_largest_scores_with_ties_at_the_last_place(number: int, chosen: list[list[int]]) -> None:
    scores, candidates = parts([[2.0, 5.0, 9.0], [2.0, -1.0]]), masks([[1, 1, 0], [1, 1]])
    assert [one.int().tolist()[0] for one in largest(scores, candidates, number)] == chosen


@pytest.mark.parametrize(
    ("threshold", "chosen"),
    [
        (0.5, [[0, 1, 0], [0, 0]]),  # at least the smallest
        (1.0, [[0, 1, 0], [0, 0]]),  # below, not at
        (1.6, [[1, 1, 0], [1, 0]]),  # 1, 2: mean 1.5; the other 2 is tied
        (2.6, [[1, 1, 0], [1, 0]]),  # 1, 2, 2, 6: mean 2.75
        (math.inf, [[1, 1, 0], [1, 1]]),
    ],
)
def test_the_smallest_scores_while_their_mean_is_below(threshold: float, chosen: list[list[int]]) -> None:
    scores, valid = parts([[2.0, 1.0, 0.0], [2.0, 6.0]]), masks([[1, 1, 0], [1, 1]])
    found = smallest_with_mean_below(scores, valid, threshold)
    assert [one.int().tolist()[0] for one in found] == chosen


def test_nobody_to_choose_from_is_no_error() -> None:
    scores, none = parts([[1.0, NAN], []]), masks([[0, 0], []])
    assert not any(one.any() for one in largest(scores, none, 3))
    assert not any(one.any() for one in smallest_with_mean_below(scores, none, 3.0))
    assert not any(one.any() for one in covariances(scores, scores, none))


@given(
    entries=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=12),
    cut=st.lists(st.integers(0, 12), max_size=3),
    number=st.integers(0, 12),
    seed=st.integers(0, 99),
)
@fixed
def test_any_cut_and_any_order_choose_the_same_whatever_the_ties(
    entries: list[tuple[int, bool]], cut: list[int], number: int, seed: int
) -> None:
    scores = torch.tensor([[float(score) for score, _ in entries]], dtype=torch.float64)
    kept = torch.tensor([[keep for _, keep in entries]])
    order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(seed))
    ends = [0, *sorted(min(place, len(entries)) for place in cut), len(entries)]
    pieces = [order[start:end] for start, end in itertools.pairwise(ends)]

    def everywhere(choose: Callable[..., list[Tensor]], *given: float) -> None:
        (whole,) = choose([scores], [kept], *given)
        cuts = choose([scores[:, own] for own in pieces], [kept[:, own] for own in pieces], *given)
        assert torch.equal(torch.cat(cuts, 1), whole[:, order])
        ranks = in_lockstep(
            *[lambda _, join, own=own: choose([scores[:, own]], [kept[:, own]], *given, join)[0] for own in pieces]
        )
        assert torch.equal(torch.cat(ranks, 1), whole[:, order])
        assert not (whole & ~kept).any()

    everywhere(largest, number)
    everywhere(smallest_with_mean_below, number / 2)


def test_keys_are_uniform_and_do_not_repeat() -> None:
    keys = shuffled_keys(torch.arange(4000), 50).flatten()
    assert keys.dtype == torch.float64 and (keys >= 0).all() and (keys < 1).all()
    assert keys.unique().numel() == keys.numel()
    tenths = torch.histc(keys, bins=10, min=0, max=1)
    assert (tenths / len(keys) - 0.1).abs().max() < 0.005  # seven deviations of a fair draw
    assert keys.mean().item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("far", [0, 10**6, 2**40])
def test_keys_of_neighbours_are_not_correlated(far: int) -> None:
    keys = shuffled_keys(torch.arange(2000) + far, 8)
    for one, other in ((keys[:-1], keys[1:]), (keys[:, :-1], keys[:, 1:]), (keys[:-1, :-1], keys[1:, 1:])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()) < 0.03


def test_a_key_is_a_function_of_sample_and_position_alone() -> None:
    samples = torch.tensor([7, -1, 2**62, 7, 0])
    keys = shuffled_keys(samples, 6)
    order = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(shuffled_keys(samples[order], 6), keys[order])
    assert torch.equal(shuffled_keys(samples, 3), keys[:, :3])
    assert torch.equal(keys[0], keys[3]) and keys[[0, 1, 2, 4]].unique().numel() == 24
    before = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(shuffled_keys(samples, 6), keys)
    torch.set_rng_state(before)


def test_keys_stay_what_they_are() -> None:
    """A run that goes on from a checkpoint, on another machine, draws what it would have drawn."""
    found = shuffled_keys(torch.tensor([0, 1]), 2)
    expected = [[0.5827496615028087, 0.16549932253995625], [0.4439591967863936, 0.7388253033424855]]
    assert found.tolist() == expected


def test_the_first_token_of_the_first_sample_is_drawn_like_any_other() -> None:
    assert shuffled_keys(torch.tensor([0]), 1).item() != 0  # the finaliser leaves 0 where it is
