"""Rollout: everything that acts on it acts on every field, so that none can be forgotten."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.support import ragged_rollout, view_of_rollout
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import FinishReason, LossView, Rollout
from lightning_rl.corrections import OUTPUTS, Outputs, outputs_from
from lightning_rl.fields import PROMPT, ROW, TOKEN, Field, Items, Ragged, declare, fields_of
from lightning_rl.rollout import concatenate, pad_lists, pad_rows, segments_of, spans_of, tree_of, turn_numbers


def whole_rollout(seed: int = 0, **options: Any) -> Rollout:
    """A rollout in which every field of tensors is there and no dict is empty."""
    rollout = ragged_rollout(seed=seed, **options)
    rows, width = rollout.response_ids.shape
    return rollout.replace(
        extras={"plain": torch.arange(rows), "wide": torch.arange(rows * 3).reshape(rows, 3) + 0.5},
        token_extras={
            "teacher": torch.arange(rows * width).reshape(rows, width) / 7,
            "routes": torch.arange(rows * width * 2).reshape(rows, width, 2),
        },
        prompt_extras={"routes": torch.arange(rows * 4 * 2).reshape(rows, 4, 2)},
        prompt_types={"kinds": torch.arange(rows * 4).reshape(rows, 4)},
        response_types={"kinds": torch.arange(rows * width).reshape(rows, width)},
    )


def whole_view() -> LossView:
    rollout = whole_rollout()
    logprobs = torch.full(rollout.response_ids.shape, -1.0)
    outputs = {spec.name: place - logprobs for place, spec in enumerate(OUTPUTS)}
    return view_of_rollout(rollout, logprobs).replace(**outputs, prepared=logprobs < -2)


RAGGED = {"segments", "prompt_items", "response_items", "segment_items"}
EXAMPLES: list[Rollout] = [whole_rollout(), whole_view()]
each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)


def each_tensor(check: Callable[[Rollout, str], None]) -> Callable[[Rollout], None]:
    """Return a test that calls ``check`` with every tensor of each example."""

    @each
    def test(example: Rollout) -> None:
        for name, _ in example.tensors():
            check(example, name)

    return test


def field_of(example: Rollout, name: str) -> Field:
    return next(spec for spec in fields_of(type(example)) if spec.name == name.partition("/")[0])


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def changed(example: Rollout, name: str, tensor: Tensor) -> Rollout:
    stem, slash, key = name.partition("/")
    return example.replace(**{stem: {**getattr(example, stem), key: tensor} if slash else tensor})


@each
def test_the_example_has_every_field(example: Rollout) -> None:
    there = {name.partition("/")[0] for name, _ in example.tensors()}
    ragged = {spec.name for spec in fields_of(type(example)) if spec.axis not in (ROW, PROMPT, TOKEN)}
    assert (there | ragged, ragged) == ({spec.name for spec in dataclasses.fields(example)}, RAGGED)


def test_every_output_of_the_forward_but_one_of_the_old_policy_is_a_field_of_the_view() -> None:
    assert {spec.output for spec in OUTPUTS} == set(Outputs._fields) - {"sum_pi_squared"}
    assert outputs_from("top_logprobs") == {"rollout_kl"}


@each_tensor
def test_select_takes_the_rows_of_every_field(example: Rollout, name: str) -> None:
    tensor, order = dict(example.tensors())[name], torch.tensor([4, 0, 4, 11])
    same(dict(example.select(order).tensors())[name], tensor[order])
    mask = torch.arange(len(example)) % 3 == 1
    same(dict(example.select(mask).tensors())[name], tensor[mask])
    assert dict(example.select(order[:0]).tensors())[name].shape == (0, *tensor.shape[1:])


@each_tensor
def test_concatenate_undoes_a_split_of_every_field(example: Rollout, name: str) -> None:
    rows = torch.arange(len(example))
    joined = concatenate([example.select(rows[:5]), example.select(rows[5:5]), example.select(rows[5:])])
    assert type(joined) is type(example)
    same(dict(joined.tensors())[name], dict(example.tensors())[name])


@each_tensor
def test_concatenate_pads_every_field_to_the_widest(example: Rollout, name: str) -> None:
    narrow = example.fit_width(4).map(lambda tensor, axis, _: tensor[:, :2] if axis == PROMPT else tensor)
    joined = dict(concatenate([narrow, example]).tensors())[name]
    have = dict(narrow.tensors())[name]
    same(joined[len(narrow) :], dict(example.tensors())[name])
    if field_of(example, name).axis == ROW:
        same(joined[: len(narrow)], have)
    else:
        same(joined[: len(narrow), : have.shape[1]], have)
        assert (joined[: len(narrow), have.shape[1] :] == field_of(example, name).pad).all()


@each_tensor
def test_fit_width_cuts_and_pads_the_response_axis_alone(example: Rollout, name: str) -> None:
    tensor = dict(example.tensors())[name]
    for width in (0, 3, example.width, 10):
        found = dict(example.fit_width(width).tensors())[name]
        if field_of(example, name).axis != TOKEN:
            same(found, tensor)
            continue
        assert found.shape == (len(example), width, *tensor.shape[2:])
        same(found[:, : example.width], tensor[:, :width])
        assert (found[:, example.width :] == field_of(example, name).pad).all()


@each_tensor
def test_padding_rows_have_every_field(example: Rollout, name: str) -> None:
    padding, tensor = dict(example.padding_rows(2).tensors())[name], dict(example.tensors())[name]
    assert padding.shape == (2, *tensor.shape[1:])
    assert padding.dtype == tensor.dtype
    assert padding.isfinite().all()


@each
def test_padding_rows_are_nobody(example: Rollout) -> None:
    padding = example.padding_rows(3)
    assert len(padding) == 3 and len(example.padding_rows(0)) == 0
    assert padding.sample_ids.tolist() == padding.groups.tolist() == [-1] * 3
    assert padding.prompt_lengths.tolist() == [1] * 3 and padding.response_lengths.tolist() == [0] * 3
    for mask in (padding.trained, padding.rewarded, padding.real, padding.valid_tokens, padding.action_mask):
        assert not mask.any()
    assert (padding.policy_version == -1).all()
    assert example.real.all()
    joined = concatenate([example, padding])
    assert joined.real.tolist() == [True] * len(example) + [False] * 3


@each_tensor
def test_moving_moves_every_field_but_arguments_of_the_model(example: Rollout, name: str) -> None:
    kept = field_of(example, name).is_argument
    assert dict(example.to("meta").tensors())[name].device.type == ("cpu" if kept else "meta")


@each
@pytest.mark.parametrize("way", ["state", "pickle", "copy", "deepcopy", "weights_only"])
def test_saving_and_copying_keep_every_field(example: Rollout, way: str) -> None:
    buffer = io.BytesIO()
    if way == "weights_only":
        torch.save(example.state(), buffer)
        buffer.seek(0)
        found = type(example).from_state(torch.load(buffer, weights_only=True))
    else:
        found = {
            "state": lambda: type(example).from_state(example.state()),
            "pickle": lambda: pickle.loads(pickle.dumps(example)),
            "copy": lambda: copy.copy(example),
            "deepcopy": lambda: copy.deepcopy(example),
        }[way]()
    assert type(found) is type(example)
    assert [name for name, _ in found.tensors()] == [name for name, _ in example.tensors()]
    for (_, ours), (_, theirs) in zip(found.tensors(), example.tensors(), strict=True):
        same(ours, theirs)
    shared = found.response_ids.data_ptr() == example.response_ids.data_ptr()
    assert shared == (way in ("state", "copy"))


@each_tensor
def test_a_wrong_number_of_rows_is_refused_by_name(example: Rollout, name: str) -> None:
    tensor = dict(example.tensors())[name]
    blame = "prompt_ids" if name == "prompt_lengths" else name  # the number of rows is that of prompt_lengths
    with pytest.raises(
        ValueError, match=rf"expected {blame} of shape \[1[12], .*got|expected {blame} of shape \[1[12]\]"
    ):
        changed(example, name, tensor[:-1])


@each_tensor
def test_a_wrong_width_or_rank_is_refused_by_name(example: Rollout, name: str) -> None:
    tensor, axis = dict(example.tensors())[name], field_of(example, name).axis
    if axis == TOKEN:
        blame = "action_mask" if name == "response_ids" else name  # the width is that of response_ids
        with pytest.raises(ValueError, match=f"expected {blame} of shape"):
            changed(example, name, tensor[:, :-1])
    if "/" not in name and name != "prompt_lengths":
        with pytest.raises(ValueError, match=f"expected {name} of shape"):
            changed(example, name, tensor[..., None])


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(Rollout)])
def test_no_field_can_be_assigned(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(EXAMPLES[0], name, None)


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(Rollout) if "Mapping" in str(spec.type)])
def test_dict_fields_are_read_only_copies(name: str) -> None:
    given: dict[str, Any] = {"own": torch.zeros(12, 4 if name.startswith("prompt") else 7)}
    if name == "rewards_by_function":
        given["own"] = given["own"][:, 0]
    if name in RAGGED:
        given["own"] = Ragged(torch.zeros(12), torch.ones(12, dtype=torch.int64))
    rollout = whole_rollout().replace(**{name: given})
    entries = getattr(rollout, name)
    with pytest.raises(TypeError):
        entries["another"] = torch.zeros(12)
    given["late"] = torch.zeros(1)
    assert list(entries) == ["own"]


def test_concatenate_refuses_different_fields_and_names_them() -> None:
    rollout = whole_rollout()
    other = rollout.replace(values=None, token_extras={"teacher": rollout.token_extras["teacher"]})
    with pytest.raises(ValueError, match=r"only some have token_extras/routes, values$"):
        concatenate([rollout, other])
    with pytest.raises(ValueError, match="at least one rollout"):
        concatenate([])


def test_entries_of_dict_fields_are_required_by_field_and_name() -> None:
    rollout = whole_rollout()
    assert rollout.require("token_extras/teacher") is rollout.token_extras["teacher"]
    with pytest.raises(ValueError, match=r'expected the rollout field "token_extras/other" to be set, got None'):
        rollout.require("token_extras/other")


def test_required_names_what_is_missing() -> None:
    rollout = whole_rollout()
    assert rollout.require("values") is rollout.values
    with pytest.raises(ValueError, match=r'expected the rollout field "values" to be set, got None'):
        rollout.replace(values=None).require("values")


def test_samples_become_padded_rows_that_nobody_has_scored() -> None:
    rollout = Rollout.of_samples([(2, 3), [4]], [[5, 6, 1], (7,)], groups=[3, 9], dtype=torch.float64)
    assert rollout.prompt_ids.tolist() == [[2, 3], [4, 0]] and rollout.prompt_lengths.tolist() == [2, 1]
    assert rollout.response_ids.tolist() == [[5, 6, 1], [7, 0, 0]] and rollout.response_lengths.tolist() == [3, 1]
    sampled = [[True] * 3, [True, False, False]]
    assert rollout.action_mask.tolist() == rollout.valid_tokens.tolist() == sampled
    assert rollout.policy_version.tolist() == [[0, 0, 0], [0, -1, -1]]
    assert rollout.groups.tolist() == [3, 9] and rollout.sample_ids.tolist() == [0, 1]
    assert rollout.finish.tolist() == [FinishReason.STOP] * 2
    assert rollout.trained.all() and rollout.rewarded.all()
    assert rollout.rewards.tolist() == [0.0, 0.0] and rollout.rewards.dtype == torch.float64
    integers = ("prompt_ids", "prompt_lengths", "response_ids", "response_lengths", "groups", "sample_ids")
    assert {getattr(rollout, name).dtype for name in integers} == {torch.int64} and not rollout.rewards_by_function


def test_samples_keep_identities_versions_and_what_nobody_drew() -> None:
    rollout = Rollout.of_samples(
        [[2], [3]], [[5, 6, 7, 1], [8, 9]], groups=[0, 0], sample_ids=[40, 41],
        finish=[FinishReason.STOP, FinishReason.LENGTH],
        versions=[[3, 3, 4, 4], [5, 5]], actions=[[True, False, False, True], [True, True]],
    )  # fmt: skip
    assert rollout.response_lengths.tolist() == [4, 2], "holes belong to the response"
    assert rollout.action_mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    assert rollout.policy_version.tolist() == [[3, -1, -1, 4], [5, 5, -1, -1]]
    assert rollout.sample_ids.tolist() == [40, 41] and rollout.finish.tolist() == [
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]


def test_an_aborted_sample_does_not_train() -> None:
    finish = [FinishReason.STOP, FinishReason.ABORT, FinishReason.LENGTH]
    rollout = Rollout.of_samples([[2]] * 3, [[5], [], [6]], groups=[0, 0, 0], finish=finish)
    assert rollout.trained.tolist() == rollout.rewarded.tolist() == [True, False, True]
    assert rollout.response_lengths.tolist() == [1, 0, 1] and rollout.response_ids.shape == (3, 1)


def test_no_samples_are_no_rows_with_the_same_fields() -> None:
    none = Rollout.of_samples([], [], groups=[])
    some = Rollout.of_samples([[2]], [[3]], groups=[0])
    assert len(none) == 0 and [name for name, _ in none.tensors()] == [name for name, _ in some.tensors()]
    assert len(concatenate([none, some])) == 1


@pytest.mark.parametrize("rows", [[], [[]], [[], [3, 4], [5]], [[1, 2, 3]]])
def test_lists_are_padded_as_tensors_are(rows: list[list[int]]) -> None:
    padded, lengths = pad_lists(rows, torch.int64)
    expected, expected_lengths = pad_rows([torch.tensor(row, dtype=torch.int64) for row in rows], torch.int64)
    assert torch.equal(padded, expected) and padded.dtype == expected.dtype
    assert lengths.tolist() == expected_lengths.tolist() == [len(row) for row in rows]
    assert padded.tolist() == [row + [0] * (padded.shape[1] - len(row)) for row in rows]


def test_rows_with_further_axes_are_padded_with_zeros() -> None:
    rows = [torch.ones(2, 3), torch.ones(0, 3), torch.full((1, 3), 2.0)]
    padded, lengths = pad_rows(rows, torch.float64)
    assert padded.dtype == torch.float64 and padded.shape == (3, 2, 3) and lengths.tolist() == [2, 0, 1]
    assert padded[:, :, 0].tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 0.0]]


def test_a_state_with_a_former_name_of_a_field_loads() -> None:
    state = ragged_rollout().state()
    older = {name.replace("rewards_by_function", "task_rewards"): value for name, value in state.items()}
    assert older.keys() != state.keys() == Rollout.from_state(older).state().keys()


NUMBERS = [[1, 1, -1, -1, 2, 0, 3], [1, 0, 2, 3], [0, 1], [], [1, -1, 2, -2, 3]]  # turns of tokens


def with_turns() -> Rollout:
    rows = Rollout.of_samples([[2]] * 5, [[3] * len(row) for row in NUMBERS], groups=range(5))
    return rows.replace(segments=segments_of(pad_lists(NUMBERS, torch.int64)[0], rows.response_lengths))


def test_turn_numbers_are_those_of_the_segments_of_a_row() -> None:
    rows, order = with_turns(), torch.tensor([4, 0, 3])
    assert rows.segments is not None
    same(turn_numbers(rows), pad_lists(NUMBERS, torch.int64)[0])
    assert rows.segments.of_row(0).tolist() == [[0, -1, 1], [2, -2, -1], [4, 1, 2], [5, 2, 0], [6, 3, 3]]
    for other in (rows.select(order, width=6), concatenate([rows, rows.padding_rows(1)]).fit_width(6).select(order)):
        same(turn_numbers(other), pad_lists([NUMBERS[row][:6] for row in order.tolist()], torch.int64)[0][:, :6])
    tree = tree_of(rows)
    roots = (tree.parents == -1) & ~tree.is_prompt
    first = (rows.prompt_lengths + rows.response_lengths).cumsum(0) - rows.response_lengths
    assert tree.row[roots].tolist() == [0, 4, 4] and (tree.starts - first[tree.row])[roots].tolist() == [2, 1, 3]
    assert spans_of(rows, 1) == [(True, [3]), (True, [3]), (True, [3]), (True, [3])]


def test_a_segment_without_tokens_has_a_turn() -> None:
    values = torch.tensor([[0, -1, 1], [2, 0, 2], [2, 1, 0], [3, 2, 3]])
    rows = Rollout.of_samples([[2]], [[5, 6, 7]], groups=[0]).replace(segments=Ragged(values, torch.tensor([4])))
    assert turn_numbers(rows).tolist() == [[1, 1, 0]]
    assert spans_of(rows, 0) == [(True, [5, 6]), (True, [7])]


def test_a_state_with_turn_numbers_instead_of_segments_loads() -> None:
    state, numbers = with_turns().state(), pad_lists(NUMBERS, torch.int64)[0]
    older = {name: value for name, value in state.items() if "segments" not in name}
    found = Rollout.from_state({**older, "token_extras/turns": numbers}).state()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pictured(Rollout):
    """A rollout with 0, 1 or 2 pictures per row, and a number per picture."""

    pictures: Ragged | None = field(default=None, metadata=declare(Items("pictures")))


COUNTS = torch.arange(12) % 3
PICTURED = Pictured.from_state(ragged_rollout().state()).replace(
    pictures=Ragged(torch.arange(24.0).reshape(12, 2)[: int(COUNTS.sum())], COUNTS)
)


def items_of(rollout: Pictured) -> list[list[list[float]]]:
    assert rollout.pictures is not None
    return [part.tolist() for part in rollout.pictures.values.split(rollout.pictures.counts.tolist())]


@pytest.mark.parametrize(
    ("operation", "rows"),
    {
        "an index with repetitions": (lambda one: one.select(torch.tensor([5, 0, 5, 2])), [5, 0, 5, 2]),
        "a mask": (lambda one: one.select(COUNTS == 2), [2, 5, 8, 11]),
        "no row": (lambda one: one.select(torch.arange(0)), []),
        "cut responses": (lambda one: one.select(torch.arange(5), width=2), range(5)),
        "wider responses": (lambda one: one.fit_width(9), range(12)),
        "a split": (lambda one: concatenate([one.select(torch.arange(5)), one.select(torch.arange(5, 12))]), range(12)),
        "with padding": (lambda one: concatenate([one, one.padding_rows(2)]), [*range(12), 0, 0]),
        "a state": (lambda one: Pictured.from_state(one.state()), range(12)),
        "a pickle": (lambda one: pickle.loads(pickle.dumps(one)), range(12)),
        "a clean copy": (lambda one: one.clone().sanitize().to("cpu"), range(12)),
    }.values(),
)  # fmt: skip
def test_items_follow_their_rows(operation: Callable[[Pictured], Pictured], rows: Sequence[int]) -> None:
    assert items_of(operation(PICTURED)) == [items_of(PICTURED)[row] for row in rows]


SHARED = ragged_rollout().replace(  # rows of a group share one or two tiles
    prompt_items={"tiles": Ragged(torch.arange(6.0)[:, None], torch.tensor([1, 2] * 6), torch.tensor([0, 4] * 6))}
)


def tiles_of(rollout: Rollout) -> list[list[list[float]]]:
    return [rollout.prompt_items["tiles"].of_row(row).tolist() for row in range(len(rollout))]


@pytest.mark.parametrize(
    ("operation", "rows", "number"),
    {
        "an index": (lambda one: one.select(torch.tensor([5, 0, 5, 2])), [5, 0, 5, 2], 3),
        "one kind": (lambda one: one.select(torch.arange(12) % 2 == 0), range(0, 12, 2), 1),
        "no row": (lambda one: one.select(torch.arange(0)), [], 0),
        "a split": (lambda one: concatenate([one.select(part) for part in torch.arange(12).split(5)]), range(12), 9),
        "with padding": (lambda one: concatenate([one, one.padding_rows(2)]), [*range(12), None, None], 6),
        "without": (lambda one: concatenate([one, one.replace(prompt_items={})]), [*range(12), *[None] * 12], 6),
        "a state": (lambda one: Rollout.from_state(one.state()), range(12), 6),
        "a copy": (lambda one: pickle.loads(pickle.dumps(one)).clone().sanitize().to("cpu").fit_width(9), range(12), 6),
    }.values(),
)  # fmt: skip
def test_rows_share_items(operation: Callable[[Rollout], Rollout], rows: Sequence[int | None], number: int) -> None:
    found = operation(SHARED)
    assert tiles_of(found) == [[] if row is None else tiles_of(SHARED)[row] for row in rows]
    assert len(found.prompt_items["tiles"].values) == number


def test_smaller_items_are_padded_behind_when_joined() -> None:
    wide = SHARED.replace(
        prompt_items={"tiles": Ragged(torch.ones(1, 3), torch.ones(12).long(), torch.zeros(12).long())}
    )
    assert tiles_of(concatenate([SHARED, wide]))[1:13:11] == [[[4.0, 0, 0], [5.0, 0, 0]], [[1.0, 1, 1]]]


def test_counts_of_items_stay_in_main_memory_and_their_values_move() -> None:
    moved = PICTURED.to("meta").pictures
    assert moved is not None and (moved.values.device.type, moved.counts.device.type) == ("meta", "cpu")
    assert [name for name, _ in PICTURED.tensors()][-2:] == ["pictures/values", "pictures/counts"]


@pytest.mark.parametrize("values", [torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64)])
def test_items_of_different_shape_or_dtype_are_refused(values: Tensor) -> None:
    other = PICTURED.select(torch.tensor([1, 2])).replace(pictures=Ragged(values, torch.tensor([1, 2])))
    with pytest.raises(
        ValueError, match=r"pictures of one dtype and shape in all rows, got torch.float32 of shape \[n, 2\] and"
    ):
        concatenate([PICTURED, other])


def test_a_ragged_field_is_required_by_its_class() -> None:
    assert PICTURED.require("pictures", Ragged) is PICTURED.pictures
    with pytest.raises(ValueError, match=r'"pictures" as Tensor, got Ragged: pass Ragged to require'):
        PICTURED.require("pictures")


def test_items_of_other_rows_or_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected counts of 12 items, got a sum of 11"):
        Ragged(torch.zeros(12), COUNTS[1:] * 0 + 1)
    with pytest.raises(ValueError, match=r"expected pictures of 12 rows, got counts of 11"):
        PICTURED.replace(pictures=Ragged(torch.zeros(11), torch.ones(11, dtype=torch.int64)))
