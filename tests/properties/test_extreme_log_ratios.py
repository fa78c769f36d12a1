"""Log-ratios of 30, 100, 1e4 and infinity through everything that makes a ratio, a weight, a mask or a KL of one."""

import math
from collections.abc import Callable

import pytest
import torch
from kit.support import run_step
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossView, RLCallback
from lightning_rl.corrections import Corrections, LossTerm
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, policy_ratio, sequence_ratio
from lightning_rl.signal.kl import KL_ESTIMATORS
from lightning_rl.signal.reductions import token_mean
from properties.batches import WITNESS
from properties.evaluation import provided, signal_of
from properties.exports import ESTIMATOR_EXAMPLES, LOSS_EXAMPLES, corrections_with, name_of

GAPS = (30.0, 100.0, 1e4, math.inf)
FIELDS = ("logprobs", "old_logprobs", "rollout_logprobs")
WITH_A_KL = ["dro", "dro-old", "kl_cov", "kl_cov-some"]  # pull back from any distance, and the more the further
WITH_A_RATIO = [name for name, loss in LOSS_EXAMPLES.items() if loss.ratio is not None and name not in WITH_A_KL]
OF_LOGPROBS = [name for name, one in ESTIMATOR_EXAMPLES.items() if {"old_logprobs", "rollout_logprobs"} & {*one.reads}]
each_field = pytest.mark.parametrize("lowered", FIELDS)
each_sign = pytest.mark.parametrize("sign", [1.0, -1.0], ids=["good", "bad"])


def rows(lowered: str, gap: float, sign: float = 1.0, *, tokens: int = 1) -> LossView:
    """Return float32 responses, in the first of which one policy gave the first token e^-gap of its probability."""
    view = WITNESS.select(torch.tensor([0, 3, 9, 0]), width=tokens).replace(sample_ids=torch.arange(4) + 7)
    view = view.map(lambda tensor, _axis, _pad: tensor.float() if tensor.is_floating_point() else tensor)
    advantages = torch.tensor([1.0, -0.5, 0.5, -1.0])[:, None].expand(4, tokens) * sign
    at = torch.zeros(4, tokens, dtype=torch.bool)
    at[0, 0] = True
    field = view.require(lowered)
    return view.replace(advantages=advantages, **{lowered: torch.where(at, field - gap, field)})


def step_of(name: str, view: LossView) -> tuple[Tensor, Tensor]:
    view = view.replace(logprobs=view.logprobs.detach().requires_grad_())
    step = run_step(view, loss=LOSS_EXAMPLES[name], reduction=token_mean)
    return step.loss, step.gradient


@each_sign
@each_field
@pytest.mark.parametrize("name", LOSS_EXAMPLES)
def test_every_loss_and_its_gradient_are_finite(name: str, lowered: str, sign: float) -> None:
    for tokens in (1, 6):
        for gap in GAPS[:3]:
            loss, gradient = step_of(name, rows(lowered, gap, sign, tokens=tokens))
            assert loss.isfinite() and gradient.isfinite().all(), (tokens, gap)


@each_sign
@pytest.mark.parametrize("lowered", FIELDS[1:])
@pytest.mark.parametrize("name", WITH_A_RATIO)
def test_beyond_the_bound_a_loss_knows_no_distance(name: str, lowered: str, sign: float) -> None:
    """Of a response of one token, whose ratio, mean and product are one: up to infinity they are e^20."""
    near, *further = (step_of(name, rows(lowered, gap, sign)) for gap in GAPS)
    for step in further:
        assert_close(step, near, rtol=0, atol=0)


@each_sign
@pytest.mark.parametrize("name", ["dro", "dro-old"])
def test_a_leash_pulls_back_from_any_distance(name: str, sign: float) -> None:
    lowered, beta = ("rollout_logprobs", 0.1) if name == "dro" else ("old_logprobs", 0.5)
    slopes = [float(step_of(name, rows(lowered, gap, sign))[1][0, 0]) for gap in (0.0, *GAPS[:3])]
    assert [slope - slopes[0] for slope in slopes[1:]] == pytest.approx([beta * gap / 4 for gap in GAPS[:3]], rel=1e-5)


@each_field
@pytest.mark.parametrize("correction", corrections_with("token_weight", "token_mask", "sequence_mask"), ids=name_of)
def test_beyond_the_bound_masks_and_weights_know_no_distance(correction: RLCallback, lowered: str) -> None:
    near, *further = (factor_of(correction, rows(lowered, gap)) for gap in GAPS)
    assert near.isfinite().all()
    for factor in further:
        assert torch.equal(factor, near)


def factor_of(correction: RLCallback, view: LossView) -> Tensor:
    corrections = Corrections([correction])
    factor = corrections.policy_factor(provided(view, correction)).factor
    assert factor is not None
    return factor


@each_field
@pytest.mark.parametrize("correction", corrections_with("loss_term", "token_reward", "provide"), ids=name_of)
def test_what_else_corrections_contribute_is_finite(correction: RLCallback, lowered: str) -> None:
    for gap in GAPS[:3]:
        view = provided(rows(lowered, gap, tokens=6), correction)
        outputs = {spec.name: output.detach().requires_grad_() for spec, output in view.outputs()}
        view, leaves = view.replace(**outputs), list(outputs.values())
        for method in sorted(correction.contributes & {"loss_term", "token_reward", "provide"}):
            given = getattr(correction, method)(view)
            if isinstance(given, LossTerm):
                slopes = torch.autograd.grad(given.per_token.sum(), leaves, allow_unused=True, materialize_grads=True)
                given = {"term": given.per_token} | {f"slope {n}": slope for n, slope in enumerate(slopes)}
            tensors = [given] if isinstance(given, Tensor) else given.values()
            assert all(tensor.isfinite().all() for tensor in tensors), (method, gap)


@each_field
@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_every_advantage_is_finite(name: str, lowered: str) -> None:
    for gap in GAPS:
        found = ESTIMATOR_EXAMPLES[name](signal_of(rows(lowered, gap, tokens=6)))
        assert found.advantages.isfinite().all() and (found.returns is None or found.returns.isfinite().all())


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS)
@pytest.mark.parametrize("gap", [*GAPS[:3], *(-gap for gap in GAPS[:3])])
def test_every_kl_and_its_gradient_are_finite(estimator: Callable[[Tensor, Tensor], Tensor], gap: float) -> None:
    logprobs = torch.tensor([min(gap, 0.0) - 0.5], requires_grad=True)
    value = estimator(logprobs, torch.tensor([-max(gap, 0.0) - 0.5]))
    value.sum().backward()
    assert value.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("gap", GAPS)
def test_the_rule(gap: float) -> None:
    far, near = torch.tensor([[-0.5]], requires_grad=True), torch.tensor([[-0.5 - gap]])
    ratios = policy_ratio(far, near), sequence_ratio(far, near, far < 0, geometric=False)
    assert [float(ratio.detach()) for ratio in ratios] == pytest.approx([math.exp(LOG_RATIO_BOUND)] * 2)
    ratios[0].sum().backward()
    assert far.grad is not None and far.grad.item() == 0.0
    assert float(policy_ratio(near, far.detach())) == pytest.approx(math.exp(-LOG_RATIO_BOUND))
