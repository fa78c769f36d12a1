"""The current rollout: any write to it is found and named; its state brings it back."""

import io

import pytest
import torch
from kit.support import ragged_rollout

from lightning_rl import Rollout
from lightning_rl.policy import make_plan
from lightning_rl.rollouts.progress import CurrentRollout


def a_rollout(*, packed: bool = True) -> CurrentRollout:
    rollout = ragged_rollout(9).replace(
        extras={"weight": torch.ones(9)}, token_extras={"teacher": torch.zeros(9, 7, dtype=torch.float64)}
    )
    rollout = rollout.map(lambda tensor, _axis, _pad: tensor.clone())  # separate tensors
    plan = make_plan(
        rollout,
        minibatches=3,
        max_tokens_per_microbatch=14,
        packed=packed,
        max_over_ranks=lambda numbers: [3 for _ in numbers],
    )
    return CurrentRollout.of(4, rollout, plan)


def names() -> list[str]:
    return [name for name, _ in a_rollout().rollout.tensors()]


@pytest.mark.parametrize("name", names())
def test_a_write_in_place_is_named(name: str) -> None:
    kept = a_rollout()
    kept.check_edits()
    dict(kept.rollout.tensors())[name].zero_()
    with pytest.raises(RuntimeError, match=rf"written to in place since it was finished: {name}; some callback"):
        kept.check_edits()


def test_reading_and_selecting_are_no_writes() -> None:
    kept = a_rollout()
    for microbatch in kept.plan.microbatches():
        microbatch.rows_of(kept.rollout).rewards.add_(1)
    kept.rollout.to("cpu").replace(rewards=torch.zeros(9))
    kept.check_edits()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_its_state_brings_it_back_through_a_file(packed: bool) -> None:
    kept, file = a_rollout(packed=packed), io.BytesIO()
    torch.save(kept.state(), file)
    file.seek(0)
    again = CurrentRollout.from_state(torch.load(file, weights_only=True), torch.device("cpu"), packed=packed)
    assert again.number == 4 and again.plan.rows() == kept.plan.rows()
    assert [m.layout.lengths for m in again.plan.microbatches()] == [m.layout.lengths for m in kept.plan.microbatches()]
    mine, theirs = dict(again.rollout.tensors()), dict(kept.rollout.tensors())
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)
    again.check_edits()
    assert isinstance(again.rollout, Rollout)
