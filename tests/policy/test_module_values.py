"""Values of modules: a tensor that is passed on is copied once, and again after it was written to."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl.policy.module_values import Event, ModuleValues, TokenPosition, record_modules

TOKENS = 3


class Twin(nn.Module):
    """Two projections of one tensor, and a change of it in place between them."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.inner, self.in_place = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), in_place

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        states = input_ids[..., None].float().expand(-1, -1, 4).contiguous()
        one = self.first(states)
        if self.in_place:
            states.mul_(2)
        return self.inner(one + self.second(states))


def recorded(*, in_place: bool) -> ModuleValues:
    model = Twin(in_place=in_place)
    positions = [TokenPosition(0, place) for place in range(TOKENS)]
    with torch.no_grad(), record_modules(model, model, lambda _: positions) as values:
        model(torch.arange(TOKENS)[None])
    return values


def stored(values: ModuleValues, module: str, side: Any) -> Tensor:
    (copy,) = values.events[Event(module, side)][0]
    return copy


def test_modules_that_read_one_tensor_share_a_copy() -> None:
    values = recorded(in_place=False)
    assert stored(values, "first", "input") is stored(values, "second", "input")
    assert stored(values, "inner", "input") is stored(values, "inner", "output") is stored(values, "", "output")


def test_a_tensor_that_was_written_to_is_copied_again() -> None:
    values = recorded(in_place=True)
    first, second = (stored(values, name, "input") for name in ("first", "second"))
    assert torch.equal(second, 2 * first) and first.abs().sum() > 0


def test_inputs_of_several_tensors_are_joined_along_their_features() -> None:
    values, positions = ModuleValues(), [TokenPosition(0, place) for place in range(TOKENS)]
    values.begin(positions, (1, TOKENS))
    one, two = torch.randn(1, TOKENS, 2), torch.randn(1, TOKENS, 3)
    values.add(Event("a", "input"), ((one,), {"states": two, "attention_mask": one}))
    found = values.at(Event("a", "input"), positions[::-1])
    assert found is not None
    assert torch.equal(found, torch.cat([one[0], two[0]], -1).flip(0))
    assert values.at(Event("b", "input"), positions) is None
