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


def test_a_value_loss_of_ones_own_is_reduced_like_the_others() -> None:
    class Absolute(ValueLoss):
        @override
        def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
            return (values - returns).abs() + old_values

    seen = view([0.5, 3.0], [0.1, 0.3], [1.0, 1.0])
    step = run_step(seen, loss=Reinforce(), value_loss=Absolute(coef=0.5))
    assert step.metrics["loss/value"] == pytest.approx((0.6 + 2.3) / 2)
    assert float(step.loss) == pytest.approx(0.5 * (0.6 + 2.3) / 2)


class Flattening(ValueLoss):
    """Is not per token."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values - returns).square().mean()


def test_a_value_loss_that_is_not_per_token_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"the value loss Flattening to return a value per token \[1, 2\], got \[\]"):
        run_step(view([0.5, 3.0], [0.1, 0.3], [1.0, 1.0]), value_loss=Flattening())


def trained(**options: Any) -> RLLightningModule:
    module = tiny_module(
        **{"advantages": "gae", "critic": "shared", "group_size": 1, "epochs_per_rollout": 2, **options}
    )
    fit(module)
    return module


@pytest.mark.nightly
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
