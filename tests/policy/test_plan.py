"""The plan: every trained row once per epoch, whole groups, the token budget, and the same number on every rank."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.support import ragged_rollout

from lightning_rl import Rollout
from lightning_rl.policy import Microbatch, Plan, make_plan
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import segments_of

forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def rows_of(plan: Plan) -> list[int]:
    return [row for microbatch in plan.microbatches() for row in microbatch.index.tolist()]


def exclude_rows(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    trained = rollout.trained.clone()
    trained[list(rows)] = False
    return rollout.replace(trained=trained, valid_tokens=rollout.action_mask & trained[:, None])


def inputs_of(microbatch: Microbatch) -> int:
    """Return the number of inputs that the model computes, padding included."""
    return microbatch.layout.input_ids.numel()


def check(rollout: Rollout, plan: Plan, *, minibatches: int, budget: int, packed: bool) -> None:
    assert len(plan.minibatches) == minibatches
    assert sorted(rows_of(plan)) == rollout.trained.nonzero()[:, 0].tolist()
    owner: dict[int, int] = {}
    for number, minibatch in enumerate(plan.minibatches):
        for microbatch in minibatch:
            if len(microbatch.index):
                assert inputs_of(microbatch) <= budget or len(microbatch.index) == 1
            for group in rollout.groups[microbatch.index].tolist():
                assert owner.setdefault(group, number) == number, f"group {group} is split"


def test_a_row_of_several_sequences_counts_each_of_them() -> None:
    turns = [[1, -1, -1, 2], [1, 1, 1, 1], [1, 1, 1, 1]]  # sequences of 2 and 3 tokens, and twice of 5
    actions = [[number > 0 for number in row] for row in turns]
    rollout = Rollout.of_samples([[2]] * 3, [[3, 4, 5, 6]] * 3, groups=range(3), actions=actions)
    rollout = rollout.replace(segments=segments_of(torch.tensor(turns), rollout.response_lengths))
    for packed, budget, expected in (
        (True, 15, [[0, 1, 2]]),
        (False, 15, [[0, 1], [2]]),  # three lines of five tokens each
        (False, 14, [[0], [1, 2]]),
        (False, 20, [[0, 1, 2]]),
    ):
        (steps,) = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=budget, packed=packed).rows()
        assert steps == expected


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7), st.booleans()), min_size=1, max_size=20),
    minibatches=st.integers(1, 5),
    budget=st.integers(1, 40),
    group_size=st.integers(1, 4),
    packed=st.booleans(),
)
def test_holds_for_any_lengths(
    lengths: list[tuple[int, int, bool]], minibatches: int, budget: int, group_size: int, packed: bool
) -> None:
    prompts, responses, kept = (list(column) for column in zip(*lengths, strict=True))
    base = ragged_rollout(len(lengths), group_size=group_size)
    inside = torch.arange(base.width) < torch.tensor(responses)[:, None]
    trained = torch.tensor(kept)
    rollout = base.replace(
        prompt_lengths=torch.tensor(prompts), response_lengths=torch.tensor(responses), action_mask=inside,
        trained=trained, valid_tokens=inside & trained[:, None],
    )  # fmt: skip
    plan = make_plan(rollout, minibatches=minibatches, max_tokens_per_microbatch=budget, packed=packed)
    check(rollout, plan, minibatches=minibatches, budget=budget, packed=packed)


def test_padded_microbatches_are_filled_in_the_order_of_lengths() -> None:
    rollout = ragged_rollout(24)
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=20, packed=False)
    lengths = (rollout.prompt_lengths + rollout.response_lengths)[rows_of(plan)].tolist()
    assert lengths == sorted(lengths, reverse=True)
    for microbatch, following in pairwise(plan.microbatches()):
        index = torch.cat([microbatch.index, following.index[:1]])
        together = (rollout.prompt_lengths + rollout.response_lengths)[index]
        assert together.max() * len(index) > 20, "the next row would have fitted"


@pytest.mark.parametrize(
    ("prompt", "response", "budget", "bound"),
    [
        (1000, 32, 4096, 1.0),
        (1000, 200, 4096, 1.0),
        (2000, 200, 4096, 1.0),
        (3000, 500, 4096, 2.3),
        (3000, 500, 16384, 1.0),
    ],
)
def test_the_budget_counts_a_shared_prompt_once(prompt: int, response: int, budget: int, bound: float) -> None:
    groups = [row // 8 for row in range(64)]
    rollout = Rollout.of_samples([[2] * prompt] * 64, [[3] * response] * 64, groups=groups)
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=budget)
    assert sum(map(inputs_of, plan.microbatches())) <= bound * 8 * (prompt + 8 * (response - 1))


def test_a_group_above_the_budget_is_split_into_as_few_parts_as_possible() -> None:
    rollout = Rollout.of_samples([[2] * 10] * 4, [[3] * number for number in (10, 10, 5, 5)], groups=[0] * 4)
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=25)
    assert plan.rows() == [[[0, 2], [1, 3]]], "the prompt once and 15 tokens of responses in each"


def test_whole_groups_fill_the_room_that_others_leave() -> None:
    responses = [[3] * number for number in (8, 8, 3, 3)]
    rollout = Rollout.of_samples([[2, 2]] * 4, responses, groups=range(4))
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=15)
    assert plan.rows() == [[[0, 2], [1, 3]]]


def test_groups_are_shared_out_evenly() -> None:
    plan = make_plan(ragged_rollout(15, group_size=3), minibatches=2, max_tokens_per_microbatch=1000)
    groups = [{row // 3 for microbatch in step for row in microbatch.index.tolist()} for step in plan.minibatches]
    assert groups == [{0, 1, 2}, {3, 4}]


def test_a_group_may_lie_anywhere_in_the_rollout() -> None:
    rollout = ragged_rollout(12).replace(groups=torch.tensor([7, 5] * 6))
    plan = make_plan(rollout, minibatches=2, max_tokens_per_microbatch=1000)
    assert [sorted(step[0].index.tolist()) for step in plan.minibatches] == [
        list(range(0, 12, 2)),
        list(range(1, 12, 2)),
    ]


@forms
def test_every_rank_runs_as_many_microbatches_as_the_busiest(packed: bool) -> None:
    asked: list[list[int]] = []

    def max_over_ranks(numbers: Sequence[int]) -> list[int]:
        asked.append(list(numbers))
        return [5, numbers[1], numbers[2] + 1]

    rollout = ragged_rollout(9)
    plan = make_plan(rollout, minibatches=3, max_tokens_per_microbatch=12, packed=packed, max_over_ranks=max_over_ranks)
    alone = make_plan(rollout, minibatches=3, max_tokens_per_microbatch=12, packed=packed)
    numbers = [len(step) for step in alone.minibatches]
    assert asked == [numbers], "one collective for the whole plan"
    assert [len(step) for step in plan.minibatches] == [5, numbers[1], numbers[2] + 1]
    assert rows_of(plan) == rows_of(alone)
    assert [len(microbatch.index) for microbatch in plan.minibatches[0][numbers[0] :]] == [0] * (5 - numbers[0])


@forms
def test_a_padding_microbatch_has_every_field_and_no_valid_token(packed: bool) -> None:
    rollout = ragged_rollout(6).replace(
        extras={"weight": torch.ones(6, 2)}, token_extras={"teacher": torch.ones(6, 7), "experts": torch.ones(6, 7, 3)}
    )
    plan = make_plan(
        rollout,
        minibatches=1,
        max_tokens_per_microbatch=1000,
        packed=packed,
        max_over_ranks=lambda numbers: [numbers[0] + 1],
    )
    padding = plan.minibatches[0][-1]
    rows = padding.rows_of(rollout)
    assert len(padding.index) == len(padding.layout.targets) == 0
    assert padding.layout.shape == rows.response_ids.shape == (1, 1)
    assert [name for name, _ in rows.tensors()] == [name for name, _ in rollout.tensors()]
    assert not rows.valid_tokens.any() and not rows.real.any() and not rows.trained.any()


@forms
def test_rows_of_a_microbatch_are_cut_to_its_longest_response(packed: bool) -> None:
    rollout = ragged_rollout(24)
    for microbatch in make_plan(rollout, minibatches=2, max_tokens_per_microbatch=12, packed=packed).microbatches():
        rows = microbatch.rows_of(rollout)
        assert rows.sample_ids.tolist() == microbatch.index.tolist()
        assert microbatch.layout.shape == rows.response_ids.shape == (len(rows), max(1, rows.response_lengths.max()))
        assert len(microbatch.layout.targets) == int(rollout.valid_tokens[microbatch.index].sum())


@forms
def test_a_saved_plan_comes_back_the_same(packed: bool) -> None:
    rollout = ragged_rollout(12)
    plan = make_plan(
        rollout,
        minibatches=2,
        max_tokens_per_microbatch=14,
        packed=packed,
        max_over_ranks=lambda numbers: [n + 1 for n in numbers],
    )
    again = plan_of_rows(rollout, plan.rows(), packed=packed)
    assert again.rows() == plan.rows()
    for mine, theirs in zip(again.microbatches(), plan.microbatches(), strict=True):
        assert mine.layout.lengths == theirs.layout.lengths and mine.layout.shape == theirs.layout.shape
        for name in ("input_ids", "position_ids", "source", "targets", "rows", "columns", "cu_queries", "cu_keys"):
            assert torch.equal(getattr(mine.layout, name), getattr(theirs.layout, name)), name


def test_the_same_rollout_gives_the_same_plan_and_epochs_repeat_it() -> None:
    first, second = (make_plan(ragged_rollout(24), minibatches=3, max_tokens_per_microbatch=14) for _ in range(2))
    assert first.rows() == second.rows()
    assert [first.step(number) for number in range(6)] == [*first.minibatches, *first.minibatches]


def test_fewer_groups_than_minibatches_leave_the_last_ones_empty() -> None:
    plan = make_plan(ragged_rollout(6, group_size=3), minibatches=4, max_tokens_per_microbatch=1000)
    assert [len(step) for step in plan.minibatches] == [1, 1, 0, 0]


@pytest.mark.parametrize("rows", [0, 6], ids=["no-rows", "all-excluded"])
def test_nothing_to_train_on_gives_padding_only(rows: int) -> None:
    rollout = exclude_rows(ragged_rollout(6), range(6)).select(torch.arange(rows))
    assert make_plan(rollout, minibatches=2, max_tokens_per_microbatch=100).rows() == [[], []]
    assert make_plan(rollout, minibatches=2, max_tokens_per_microbatch=100, max_over_ranks=lambda _: [2, 1]).rows() == [
        [[], []],
        [[]],
    ]


def test_a_plan_moves_as_a_whole() -> None:
    moved = make_plan(ragged_rollout(6), minibatches=2, max_tokens_per_microbatch=14).to("meta")
    assert {microbatch.index.device.type for microbatch in moved.microbatches()} == {"meta"}
    assert {microbatch.layout.source.device.type for microbatch in moved.microbatches()} == {"meta"}
