"""KL estimators: values, gradients, the restoring force, and what they estimate on an exact softmax."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_rl.signal.kl import (
    KL_ESTIMATORS,
    TANGENT_BEYOND,
    Clamped,
    KLEstimator,
    binary_kl,
    importance,
    k1,
    k2,
    k3,
    kl_estimator,
    tangent_expm1,
)

LOGPROBS, OTHER = [-1.0, -2.0, -3.0, -8.0], [-1.5, -2.0, -2.0, -2.0]


def slope(estimator: KLEstimator, logprobs: Tensor, other: Tensor) -> Tensor:
    current = logprobs.detach().requires_grad_()
    return torch.autograd.grad(estimator(current, other).sum(), current)[0]


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        pytest.param("k1", [0.5, 0, -1, -6], [1, 1, 1, 1], id="k1"),
        pytest.param("abs", [0.5, 0, 1, 6], [1, 0, -1, -1], id="abs"),
        pytest.param("k2", [0.125, 0, 0.5, 18], [0.5, 0, -1, -6], id="k2"),
        pytest.param("k3", [0.1065307, 0, 0.7182818, 396.4287934], [0.3934693, 0, -1.7182818, -402.4287934], id="k3"),
        pytest.param(
            "binary_kl", [0.0536011, 0, 0.0398601, 0.1430165], [0.2597938, 0, -0.0544842, -0.0020614], id="binary_kl"
        ),
    ],
)
def test_estimators_have_the_published_values_and_gradients(
    name: str, values: list[float], gradient: list[float]
) -> None:
    current, other = torch.tensor(LOGPROBS, dtype=torch.float64), torch.tensor(OTHER, dtype=torch.float64)
    estimator = kl_estimator(name)
    assert_close(estimator(current, other), torch.tensor(values, dtype=torch.float64), atol=1e-6, rtol=0)
    assert_close(slope(estimator, current, other), torch.tensor(gradient, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("logprob", "other", "value", "gradient"),
    [
        pytest.param(0.0, 0.0, 0.0, 0.0, id="both-certain"),
        pytest.param(-25.0, -25.0, 0.0, 0.0, id="both-given-up"),
        pytest.param(-1e-6, -2e-6, math.log(2) * -1e-6 + 1e-6, math.log(2), id="almost-certain"),  # of the others
        pytest.param(math.log(0.5), 0.0, 0.5 * math.log(0.5) + 0.5 * math.log(5e7), -9.2103404, id="other-certain"),
        pytest.param(0.0, -200.0, 18.420681 - 1e-8, 18.420681, id="at-most"),
    ],
)
def test_the_binary_kl_where_probabilities_are_extreme(
    logprob: float, other: float, value: float, gradient: float, dtype: torch.dtype
) -> None:
    current, fixed = torch.tensor([logprob], dtype=dtype), torch.tensor([other], dtype=dtype)
    assert binary_kl(current, fixed).tolist() == pytest.approx([value], rel=1e-4, abs=2e-10)
    assert slope(binary_kl, current, fixed).tolist() == pytest.approx([gradient], rel=1e-4, abs=1e-9)


def test_the_binary_kl_of_almost_equal_policies_is_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -(torch.rand(100_000, generator=generator) * 12).exp() * 1e-5
    other = (logprobs * (1 + 0.3 * torch.randn(100_000, generator=generator))).clamp(max=0)
    nearby = logprobs * (1 + 1e-3 * torch.randn(100_000, generator=generator)).clamp(min=0)
    assert min(float(binary_kl(logprobs, one).min()) for one in (other, nearby)) >= 0


def test_the_exponential_goes_on_as_its_tangent() -> None:
    exponent = torch.tensor([0.0, 19.0, TANGENT_BEYOND, 21.0, 1e4], dtype=torch.float64, requires_grad=True)
    values = tangent_expm1(exponent) + 1
    edge = math.exp(TANGENT_BEYOND)
    expected = [1.0, math.exp(19), edge, 2 * edge, edge * (1e4 - 19)]
    assert_close(values, torch.tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(values.sum(), exponent)
    assert_close(gradient, torch.tensor([1.0, math.exp(19), edge, edge, edge], dtype=torch.float64))


@given(st.floats(-200, 200), st.floats(-200, 200))
def test_k2_and_k3_are_never_negative(current: float, other: float) -> None:
    pair = torch.tensor([current], dtype=torch.float64), torch.tensor([other], dtype=torch.float64)
    assert k2(*pair) >= 0
    assert k3(*pair) >= -1e-12


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_broken_token_spoils_no_other(name: str, poison: float) -> None:
    current, other = torch.tensor(LOGPROBS), torch.tensor([*OTHER[:3], poison])
    whole = torch.tensor(OTHER)
    estimator = kl_estimator(name)
    assert_close(estimator(current, other)[:3], estimator(current, whole)[:3])
    assert_close(slope(estimator, current, other)[:3], slope(estimator, current, whole)[:3])


def expectation(estimator: KLEstimator, logits: Tensor, other: Tensor, *, weighted: bool = False) -> tuple[Tensor, ...]:
    """Value and gradient of E_p[estimator] with the samples held fixed, exactly, over a small vocabulary."""
    logits = logits.detach().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimate = estimator(logprobs, other)
    if weighted:
        estimate = (logprobs - logprobs.detach()).exp() * estimate
    value = (logprobs.detach().exp() * estimate).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


def test_estimators_estimate_and_pull_as_the_table_says() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    reverse = (logprobs.exp() * (logprobs - other)).sum()
    forward = (other.exp() * (other - logprobs)).sum()
    pull_reverse = torch.autograd.grad(reverse, logits, retain_graph=True)[0]
    pull_forward = torch.autograd.grad(forward, logits)[0]
    exact = partial(assert_close, atol=1e-10, rtol=0)
    for estimator in (k1, k3):  # both unbiased as metrics, and as weighted losses
        value, pull = expectation(estimator, logits, other, weighted=True)
        exact(value, reverse.detach())
        exact(pull, pull_reverse)
    exact(expectation(k1, logits, other)[1], torch.zeros(4, dtype=torch.float64))
    exact(expectation(k2, logits, other)[1], pull_reverse)
    exact(expectation(k3, logits, other)[1], pull_forward)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"out of k1, abs, k2, k3, binary_kl, an object or a function, got 'k4'"):
        kl_estimator("k4")
    with pytest.raises(ValueError, match=r"an object or a function, got <class '.*Clamped'>"):
        kl_estimator(Clamped)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-3])
def test_k3_is_accurate_and_never_negative_for_the_smallest_gaps_in_float32(size: float) -> None:
    gap = size * torch.linspace(-1, 1, 4001)
    found, exact = k3(gap, torch.zeros_like(gap)), k3(gap.double(), torch.zeros_like(gap).double())
    assert (found >= 0).all()
    assert float(found.double().mean()) == pytest.approx(float(exact.mean()), rel=1e-3)
    assert float(exact.mean()) == pytest.approx(size**2 / 6, rel=1e-2)


def test_the_estimators_of_peers_on_their_batch() -> None:
    new = torch.tensor([-0.2, -1.5, -0.7, -3.0, -0.9, -0.1, -2.2, -0.4], dtype=torch.float64)
    gaps = torch.tensor([0.2, -0.3, 0.2, -1.0, 0.1, 0.1, -0.4, 0.2], dtype=torch.float64)
    old = torch.tensor([-0.5, -1.0, -0.7, -1.0, -1.2, -0.1, -2.0, -0.4], dtype=torch.float64)
    plain = [0.01873, 0.04986, 0.01873, 0.71828, 0.00484, 0.00484, 0.09182, 0.01873]
    weighed = [0.02528, 0.03024, 0.01873, 0.09721, 0.00653, 0.00484, 0.07518, 0.01873]
    found = k3(new, new - gaps)
    assert found.tolist() == pytest.approx(plain, abs=1e-5)
    assert (importance(new, old) * found).tolist() == pytest.approx(weighed, abs=1e-5)


def pull_at(point: Tensor, other: Tensor) -> float:
    return slope(Clamped(k3), point, other).item()


@pytest.mark.parametrize(
    ("gap", "value", "slope"),
    [
        pytest.param(0.5, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5), id="inside"),
        pytest.param(-2.5, math.exp(2.5) - 3.5, 1 - math.exp(2.5), id="still-inside"),
        pytest.param(-2.7, 10.0, 0.0, id="beyond-the-value"),
        pytest.param(-50.0, 10.0, 0.0, id="far"),
        pytest.param(30.0, 10.0, 0.0, id="far-on-the-other-side"),
    ],
)
def test_clamped_k3_is_k3_until_its_clamp_takes_the_gradient(gap: float, value: float, slope: float) -> None:
    point, other = torch.tensor([gap], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert Clamped(k3)(point, other).item() == pytest.approx(value)
    assert pull_at(point, other) == pytest.approx(slope)


def test_both_bounds_of_clamped_bind_on_either_side() -> None:
    gaps, nothing = torch.tensor([-9.0, -1.0, 1.0, 9.0]), torch.zeros(4)
    assert Clamped(k1, value=3.0)(gaps, nothing).tolist() == [-3.0, -1.0, 1.0, 3.0]
    assert Clamped(k1, value=math.inf, log_ratio=2.0)(gaps, nothing).tolist() == [-2.0, -1.0, 1.0, 2.0]
    assert Clamped(k2, value=math.inf, log_ratio=2.0)(gaps, nothing).tolist() == [2.0, 0.5, 0.5, 2.0]
    assert torch.equal(Clamped(k2, value=math.inf)(gaps, nothing), k2(gaps, nothing))
    for bound, slopes in (({"value": 3.0}, [0, 1, 1, 0]), ({"value": 99.0, "log_ratio": 2.0}, [0, 1, 1, 0])):
        assert slope(Clamped(k1, **bound), gaps, nothing).tolist() == slopes


def test_importance_is_1_with_the_score_function_gradient_on_own_samples() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ratio = importance(logprobs)
    assert ratio.tolist() == [1.0, 1.0]
    assert torch.autograd.grad(ratio.sum(), logprobs)[0].tolist() == [1.0, 1.0]
    from_another = importance(logprobs, torch.tensor([-1.5, -30.0], dtype=torch.float64))
    assert from_another.tolist() == pytest.approx([math.exp(0.5), math.exp(20)])
    assert torch.autograd.grad(from_another.sum(), logprobs)[0].tolist() == pytest.approx([math.exp(0.5), 0.0])
