"""No exported formula leaves its gradient at a corner to torch: every operation that a gradient runs through is smooth.

Conditions are smooth as well, because a mask has no gradient. Corners are in :mod:`lightning_rl.signal.subgradients`.
"""

import pytest
import torch
from kit.support import an_algorithm
from torch import Tensor
from torch.autograd.graph import Node

from lightning_rl import PolicyLoss, RLCallback, ValueLoss
from lightning_rl.losses import FunctionLoss
from lightning_rl.signal.kl import KL_ESTIMATORS, Clamped, KLEstimator, k3
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import token_mean
from properties.batches import WITNESS
from properties.evaluation import LEAVES, prepared_view, provided
from properties.exports import LOSS_EXAMPLES, VALUE_EXAMPLES, corrections_with, name_of

SMOOTH = {"Add", "Div", "Exp", "Expm1", "Log", "Mul", "Neg", "Pow", "Sigmoid", "Sub", "Sum"}
SMOOTH |= {"Expand", "MaskedFill", "Unsqueeze", "Where"}  # no arithmetic
ESTIMATORS: dict[str, KLEstimator] = {**KL_ESTIMATORS, "clamped": Clamped(k3, value=1.0, log_ratio=0.5)}


def operations(loss: Tensor) -> set[str]:
    """Return the names of the operations that the gradient of a loss runs through."""
    nodes, waiting = set[Node](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__.partition("Backward")[0] for node in nodes} - {"AccumulateGrad"}


def step_operations(
    *callbacks: RLCallback, loss: PolicyLoss | None = None, value_loss: ValueLoss | None = None
) -> set[str]:
    """Return the operations of one microbatch; by default the policy loss is smooth."""
    smooth = FunctionLoss(lambda view: -view.require("advantages") * view.logprobs)
    algorithm = an_algorithm(callbacks, loss=loss or smooth, value_loss=value_loss, reduction=token_mean)
    view = prepared_view(provided(WITNESS, *callbacks), algorithm.loss)
    view = view.replace(**{name: view.require(name).detach().requires_grad_() for name in LEAVES})
    weights = token_mean(view.valid_tokens, view.trained, view.groups, local_sum)
    return operations(algorithm.microbatch_loss(view, lambda _: weights).total)


@pytest.mark.parametrize("name", LOSS_EXAMPLES)
def test_policy_losses(name: str) -> None:
    assert step_operations(loss=LOSS_EXAMPLES[name]) <= SMOOTH


@pytest.mark.parametrize("name", VALUE_EXAMPLES)
def test_value_losses(name: str) -> None:
    assert step_operations(value_loss=VALUE_EXAMPLES[name]) <= SMOOTH


@pytest.mark.parametrize("correction", corrections_with("loss_term", "token_weight"), ids=name_of)
def test_corrections(correction: RLCallback) -> None:
    assert step_operations(correction) <= SMOOTH


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimators(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert operations(ESTIMATORS[name](logprobs, torch.tensor([-1.5, -1.0]))) <= SMOOTH


def test_a_clamp_is_no_smooth_operation() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    corners = [logprobs.clamp(max=0), logprobs.abs(), torch.maximum(logprobs, -logprobs), logprobs.relu()]
    assert [operations(corner) & SMOOTH for corner in corners] == [set(), set(), {"Neg"}, set()]
