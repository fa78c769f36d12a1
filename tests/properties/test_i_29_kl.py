"""I-25 and I-29: every exported KL estimator, by exact expectation over a small softmax, and its restoring force."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_rl.signal.kl import KL_ESTIMATORS, Clamped, binary_kl, importance, k3

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.1, -0.4], dtype=torch.float64)
OTHER = torch.tensor([1.0, 0.2, -0.5, 0.4, 0.9], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([0.1, 0.3, 1.0, -0.2, 0.5], dtype=torch.float64).log_softmax(0)
NOTHING = torch.zeros(5, dtype=torch.float64)
ESTIMATORS = {**KL_ESTIMATORS, "clamped": Clamped(k3)}
each = pytest.mark.parametrize("name", ESTIMATORS)

UNBIASED = {"k1", "k3", "clamped"}  # in value, on samples of the policy; here the clamp of the last does not bind
PULLS = {"k1": "nothing", "abs": "other", "k2": "reverse", "k3": "forward", "clamped": "forward", "binary_kl": "other"}
WEIGHTED_PULLS = {
    "k1": "reverse",
    "abs": "other",
    "k2": "other",
    "k3": "reverse",
    "clamped": "reverse",
    "binary_kl": "other",
}


def expected(estimate: Callable[[Tensor], Tensor], sampler: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Value and gradient of E[estimate(logprobs)] with the samples held fixed; by default the policy's own."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    drawn = logprobs.detach() if sampler is None else sampler
    value = (drawn.exp() * estimate(logprobs)).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


def divergences() -> dict[str, tuple[Tensor, Tensor]]:
    """KL(policy || other), KL(other || policy), each with its gradient."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    found = {
        "reverse": (logprobs.exp() * (logprobs - OTHER)).sum(),
        "forward": (OTHER.exp() * (OTHER - logprobs)).sum(),
    }
    return {name: (one.detach(), torch.autograd.grad(one, logits, retain_graph=True)[0]) for name, one in found.items()}


def pulls_like(gradient: Tensor) -> str:
    """Which divergence has this gradient, to 1e-10."""
    known = {name: pull for name, (_, pull) in divergences().items()} | {"nothing": NOTHING}
    return next((name for name, pull in known.items() if torch.allclose(gradient, pull, atol=1e-10, rtol=0)), "other")


def test_every_estimator_has_its_identities() -> None:
    assert PULLS.keys() == WEIGHTED_PULLS.keys() == ESTIMATORS.keys()
    assert set(PULLS) >= UNBIASED


@each
def test_i_29_value_and_gradient_on_samples_of_the_policy(name: str) -> None:
    value, gradient = expected(lambda logprobs: ESTIMATORS[name](logprobs, OTHER))
    assert torch.allclose(value, divergences()["reverse"][0], atol=1e-10, rtol=0) == (name in UNBIASED)
    assert pulls_like(gradient) == PULLS[name]


@each
@pytest.mark.parametrize("sampler", [None, SAMPLER], ids=["own-samples", "samples-of-another"])
def test_i_29_weighed_with_the_importance_ratio(name: str, sampler: Tensor | None) -> None:
    value, gradient = expected(lambda logp: importance(logp, sampler) * ESTIMATORS[name](logp, OTHER), sampler)
    assert torch.allclose(value, divergences()["reverse"][0], atol=1e-10, rtol=0) == (name in UNBIASED)
    assert pulls_like(gradient) == WEIGHTED_PULLS[name]


def test_i_29_on_samples_of_another_policy_an_unweighed_estimate_is_biased() -> None:
    for name in UNBIASED - {"k1"}:
        value, _ = expected(lambda logp, own=name: ESTIMATORS[own](logp, OTHER), SAMPLER)
        assert not torch.allclose(value, divergences()["reverse"][0], atol=1e-3, rtol=0)
    _, gradient = expected(lambda logp: ESTIMATORS["k1"](logp, SAMPLER), SAMPLER)
    logits = LOGITS.clone().requires_grad_()
    (away,) = torch.autograd.grad((SAMPLER.exp() * (SAMPLER - logits.log_softmax(0))).sum(), logits)
    assert_close(gradient, -away, atol=1e-10, rtol=0)  # k1 drives the policy away from the one that sampled


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "binary_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_i_25_the_pull_never_weakens_with_the_drift_unless_the_value_is_clamped(
    name: str, dtype: torch.dtype, sign: int
) -> None:
    gap = (sign * torch.linspace(0.01, 100, 3001, dtype=dtype)).requires_grad_()
    values = ESTIMATORS[name](gap, torch.zeros_like(gap))
    force = torch.autograd.grad(values.sum(), gap)[0].abs()
    assert values.isfinite().all() and force.isfinite().all()
    holds = bool((force.diff() >= 0).all() and force[-1] > 0.99)
    assert holds != isinstance(ESTIMATORS[name], Clamped)


def test_i_25_the_pull_of_the_binary_kl_fades_as_the_policy_gives_a_token_up() -> None:
    logprobs = torch.linspace(-1.0, -15.0, 15, dtype=torch.float64).requires_grad_()
    force = torch.autograd.grad(binary_kl(logprobs, torch.full_like(logprobs, -0.5)).sum(), logprobs)[0]
    assert (force < 0).all() and (force[2:].diff() > 0).all() and -force[-1] < 1e-4


def test_the_binary_kl_is_never_negative_and_at_most_the_whole() -> None:
    logprobs, whole = LOGITS.log_softmax(0), divergences()["reverse"][0]
    values = binary_kl(logprobs, OTHER)
    assert (values >= 0).all() and (values <= whole + 1e-12).all()
    certain = torch.tensor([0.0, 0.0, -1e-9, -200.0])
    assert binary_kl(certain, torch.tensor([0.0, -200.0, -30.0, 0.0])).isfinite().all()


@each
def test_i_01_and_i_08_estimators_are_pure_and_0_between_equal_policies(name: str) -> None:
    logprobs, other = LOGITS.log_softmax(0), OTHER.clone()
    before = logprobs.clone()
    first, second = ESTIMATORS[name](logprobs, other), ESTIMATORS[name](logprobs, other)
    assert torch.equal(first, second) and torch.equal(logprobs, before) and torch.equal(other, OTHER)
    assert not ESTIMATORS[name](logprobs, logprobs).any()
