"""PassAtK: the advantage of the best answer of a group."""

import math

import pytest
import torch
from torch.testing import assert_close

from lightning_rl.advantages import PassAtK


@pytest.mark.parametrize(
    ("scores", "groups", "rewarded", "expected"),
    [
        pytest.param([1, 0, 3], [0, 0, 0], [1, 1, 1], [0, 0, 2], id="best-minus-second"),
        pytest.param([1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], id="two-best-teach-nothing"),
        pytest.param([1, 0, 5, 2], [7, 7, 3, 3], [1] * 4, [1, 0, 3, 0], id="each-group-has-its-own"),
        pytest.param([4, 9, 2], [0, 0, 0], [1, 0, 1], [2, 0, 0], id="row-left-out"),
        pytest.param([4, math.nan, 2], [0, 0, 0], [1, 0, 1], [2, 0, 0], id="nan-left-out"),
        pytest.param([-1, -3], [0, 0], [1, 1], [2, 0], id="below-zero"),
        pytest.param([6], [0], [1], [0], id="group-of-one"),
        pytest.param([6, 1], [0, 0], [1, 0], [0, 0], id="one-rewarded-row"),
        pytest.param([2, 2, 2], [0, 0, 0], [1, 1, 1], [0, 0, 0], id="equal"),
    ],
)
def test_hand_worked_groups(scores: list[float], groups: list[int], rewarded: list[int], expected: list[float]) -> None:
    given = torch.tensor(scores, dtype=torch.float32), torch.tensor(groups), torch.tensor(rewarded).bool()
    assert PassAtK().per_row(*given).tolist() == expected


def test_scaled_it_is_divided_by_the_deviation_of_the_group() -> None:
    given = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 0]), torch.ones(3).bool()
    deviation = math.sqrt(7 / 3)  # of 1, 0 and 3 around 4/3
    assert_close(PassAtK(scaled=True, epsilon=0.0).per_row(*given), torch.tensor([0.0, 0.0, 2 / deviation]))
    biased = PassAtK(scaled=True, unbiased=False, epsilon=0.5).per_row(*given)
    assert_close(biased, torch.tensor([0.0, 0.0, 2 / (math.sqrt(14 / 9) + 0.5)]))


def test_it_is_the_gradient_of_the_expected_maximum() -> None:
    """Over all pairs of answers: the mean of advantage times score function is the slope of E[max]."""
    logits, rewards = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64).requires_grad_(), [0.0, 1.0, 3.0]
    logprobs = logits.log_softmax(0)
    probabilities = logprobs.exp()
    pairs = [(one, other) for one in range(3) for other in range(3)]
    expected = torch.stack([probabilities[a] * probabilities[b] * max(rewards[a], rewards[b]) for a, b in pairs]).sum()
    surrogate = torch.zeros((), dtype=torch.float64)
    for a, b in pairs:
        scores = torch.tensor([rewards[a], rewards[b]], dtype=torch.float64)
        advantage = PassAtK().per_row(scores, torch.tensor([0, 0]), torch.tensor([True, True]))
        weight = (probabilities[a] * probabilities[b]).detach()
        surrogate = surrogate + weight * (advantage[0] * logprobs[a] + advantage[1] * logprobs[b])
    wanted, found = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (expected, surrogate))
    assert_close(found, wanted)
