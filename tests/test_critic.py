"""Loss of the critic: ValueLoss or a subclass, checked like the policy loss."""

from typing import Any

import pytest
import torch
from kit.support import fit, run_step, tiny_module, view_of, weights_of
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import LossView, Reinforce, RLLightningModule, ValueLoss


def view(current: list[float], old: list[float], returns: list[float]) -> LossView:
    found = view_of([-1.0] * len(old), values=old, returns=returns, current_values=current, advantages=[0.0] * len(old))
    return found.replace(current_values=found.require("current_values").requires_grad_())


@pytest.mark.parametrize(
    ("options", "current", "old", "loss"),
    [
        pytest.param({}, 0.5, 0.0, 0.5 * 0.8**2, id="clipped-at-0.2-by-default"),
        pytest.param({"clip": 0.1}, 0.5, 0.0, 0.5 * 0.9**2, id="clip"),
        pytest.param({"clip": None}, 0.5, 0.0, 0.5 * 0.5**2, id="no-clip"),
        pytest.param({"clip": None, "huber": 0.25}, 0.5, 0.0, 0.25 * (0.5 - 0.125), id="huber"),
        pytest.param({"clip": 0.1, "huber": 0.25}, 0.5, 0.0, 0.25 * (0.9 - 0.125), id="both"),
        pytest.param({}, 1.5, 1.4, 0.5 * 0.5**2, id="within-the-clip"),
    ],
)
def test_value_loss_by_hand(options: dict[str, Any], current: float, old: float, loss: float) -> None:
    given = [torch.tensor([[number]]) for number in (current, old, 1.0)]
    assert float(ValueLoss(**options)(*given)) == pytest.approx(loss)


def test_a_value_loss_of_ones_own_is_reduced_like_the_others() -> None:
    class Absolute(ValueLoss):
        @override
        def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
            return (values - returns).abs() + old_values

    seen = view([0.5, 3.0], [0.1, 0.3], [1.0, 1.0])
    step = run_step(seen, loss=Reinforce(), value_loss=Absolute(coef=0.5))
    assert step.metrics["loss/value"] == pytest.approx((0.6 + 2.3) / 2)
    assert float(step.loss) == pytest.approx(0.5 * (0.6 + 2.3) / 2)


def test_a_plain_function_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"expected value_loss to be an object such as ValueLoss\(coef=0.5\)"):
        tiny_module(value_loss=lambda values, _, returns: values - returns)


class Flattening(ValueLoss):
    """Is not per token."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns).square().mean()


class Writing(ValueLoss):
    """Writes to what it is given."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns.mul_(2.0)).square()


def test_a_value_loss_that_is_not_per_token_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"the value loss Flattening to return a value per token \[1, 2\], got \[\]"):
        run_step(view([0.5, 3.0], [0.1, 0.3], [1.0, 1.0]), value_loss=Flattening())


def trained(**options: Any) -> RLLightningModule:
    module = tiny_module(
        **{"advantages": "gae", "critic": "shared", "group_size": 1, "epochs_per_rollout": 2, **options}
    )
    fit(module)
    return module


def test_in_a_fit_the_loss_that_was_passed_is_the_one_that_trains() -> None:
    class Plain(ValueLoss):
        @override
        def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
            return ValueLoss(clip=0.01)(values, old_values, returns)

    expected, default, function = trained(value_loss=ValueLoss(clip=0.01)), trained(), trained(value_loss=Plain())
    for name, weight in weights_of(expected).items():
        assert_close(weights_of(function)[name], weight, atol=0, rtol=0)
    head = "policy.value_head.weight"
    assert not torch.equal(weights_of(default)[head], weights_of(expected)[head])
    assert torch.equal(weights_of(default)[head], weights_of(trained(value_loss=ValueLoss()))[head])
