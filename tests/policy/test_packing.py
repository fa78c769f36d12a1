"""Packed, padded and alone are the same policy: values, gradients, checkpointing, decoding, refusals."""

import copy
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.support import keep_double, ragged_rollout, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl import Rollout
from lightning_rl.policy import Layout, PolicyModel, pack
from lightning_rl.policy.model import check_scoring
from lightning_rl.rollout import concatenate, pad_rows, segments_of

exactly = torch.testing.assert_close
each_family = pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gemma3_text", "gemma4_text", "qwen3_moe"])
forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


class Scored(NamedTuple):
    """Outputs of a policy for a rollout, and the gradient of a fixed function of them."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    gradient: list[Tensor]


def rows_with_everything() -> Rollout:
    """Ragged rows with holes and an empty one, an excluded row, a one-token prompt without response, and padding."""
    rollout = ragged_rollout(9, dtype=torch.float64)
    prompts, lengths, trained = rollout.prompt_lengths.clone(), rollout.response_lengths, rollout.trained.clone()
    prompts[lengths == 0], trained[2] = 1, False
    rollout = rollout.replace(
        prompt_lengths=prompts, trained=trained, valid_tokens=rollout.action_mask & trained[:, None]
    )
    assert (rollout.action_mask.sum(-1) < lengths).any() and (lengths == 0).any()
    return concatenate([rollout, rollout.padding_rows(2)])


def rows_of_groups() -> Rollout:
    """The same with one prompt for each group, but for one row that begins alike and goes on in another way."""
    rollout = rows_with_everything()
    first = torch.tensor([0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 10])
    prompts = rollout.prompt_ids[first]
    prompts[7, 2] = 1
    rollout = rollout.replace(prompt_ids=prompts, prompt_lengths=torch.tensor([3] * 3 + [1] * 3 + [4] * 3 + [1] * 2))
    assert pack(rollout).shared is not None
    return rollout


def policy_of(model: PreTrainedModel, *, packed: bool) -> PolicyModel:
    model = copy.deepcopy(model)
    policy = PolicyModel(model, model, temperature=0.7, packed=packed)
    assert policy.value_head is not None
    policy.value_head.weight.data = torch.linspace(-1, 1, policy.value_head.in_features, dtype=model.dtype)[None]
    return policy


some_rows = pytest.mark.parametrize(
    "rows", [rows_with_everything(), rows_of_groups()], ids=["prompts of each row", "prompts of groups"]
)


def differentiated(policy: PolicyModel, logprobs: Tensor, entropy: Tensor, values: Tensor) -> Scored:
    slopes = torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    policy.zero_grad()
    (logprobs * slopes + entropy * slopes.flip(0) + values * slopes.flip(1)).sum().backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return Scored(logprobs.detach(), entropy.detach(), values.detach(), gradient)


def together(policy: PolicyModel, rows: Rollout, *, packed: bool) -> Scored:
    logprobs, entropy, values, *_ = policy(pack(rows, packed=packed))
    return differentiated(policy, logprobs, entropy, values)


def alone(policy: PolicyModel, rows: Rollout) -> Scored:
    """Every row by itself through the model's own forward, in the plainest way."""
    policy.model.set_attn_implementation("sdpa")
    assert policy.value_head is not None
    found = [torch.zeros(rows.response_ids.shape, dtype=torch.float64) for _ in range(3)]
    for row in range(len(rows)):
        prompt, response = int(rows.prompt_lengths[row]), int(rows.response_lengths[row])
        ids = torch.cat([rows.prompt_ids[row, :prompt], rows.response_ids[row, :response]])
        output = policy.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        scores = (output.logits[0] / policy.temperature).log_softmax(-1)
        values = policy.value_head(output.hidden_states[-1][0])[:, 0]
        for column in rows.valid_tokens[row].nonzero()[:, 0].tolist():
            before = prompt + column - 1
            target = int(rows.response_ids[row, column])
            for tensor, value in zip(
                found, (scores[before, target], -(scores[before].exp() @ scores[before]), values[before]), strict=True
            ):
                tensor[row, column] = value
    return differentiated(policy, *found)


@each_family
@forms
@some_rows
def test_scores_and_gradient_are_those_of_every_sequence_alone(
    rows: Rollout, family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_double(monkeypatch)
    model = tiny_model(family)
    expected = alone(policy_of(model, packed=False), rows)
    found = together(policy_of(model, packed=packed), rows, packed=packed)
    exactly(found, expected, rtol=0, atol=1e-6 if family == "qwen3_moe" else 1e-10)  # its router rounds to float32
    assert expected.logprobs[rows.valid_tokens].std() > 0.5, "a nearly uniform policy would hide a mistake"


PROMPTS, RESPONSES = [[2, 3], [4], [5, 6]], [[7, 8, 9, 2, 3, 10, 4, 11, 12], [13, 14], [3, 5, 6, 3, 7, 9]]
NUMBERS = [[1, 1, -1, -1, -1, 2, -2, 3, 3], [1, 1], [1, -1, -1, -1, 0, 2]]  # turns


def with_contexts() -> Rollout:
    """Rows of three sequences, one, and one whose context is rewritten as it was."""
    turns = pad_rows([torch.tensor(row) for row in NUMBERS], torch.int64)[0]
    actions = [[number > 0 for number in row] for row in NUMBERS]
    rows = Rollout.of_samples(PROMPTS, RESPONSES, groups=range(3), actions=actions, dtype=torch.float64)
    return rows.replace(segments=segments_of(turns, rows.response_lengths))


APART = Rollout.of_samples(
    [[2, 3], [9, 2, 3], [4], [4], [5, 6], [5, 6, 3]],
    [[7, 8], [10], [11, 12], [13, 14], [3], [7, 9]],
    groups=range(6),
    actions=[[True] * 2, [True], [True] * 2, [True] * 2, [True], [False, True]],
    dtype=torch.float64,
)
"""The same with a row for each sequence."""


@each_family
@forms
def test_a_rewritten_context_is_read_on_its_own(family: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_double(monkeypatch)
    model, rows = tiny_model(family), with_contexts()
    expected, found = policy_of(model, packed=False), policy_of(model, packed=packed)
    wanted, given = expected(pack(APART, packed=False)), found(pack(rows, packed=packed))
    slopes = torch.linspace(-1, 2, int(rows.valid_tokens.sum()), dtype=torch.float64)
    for outputs, valid in ((wanted, APART.valid_tokens), (given, rows.valid_tokens)):
        torch.stack([part[valid] @ slopes.roll(place) for place, part in enumerate(outputs[:3])]).sum().backward()
    for ours, theirs in zip(given[:3], wanted[:3], strict=True):
        exactly(ours[rows.valid_tokens], theirs[APART.valid_tokens], rtol=0, atol=1e-10)
        assert not ours[~rows.valid_tokens].any() and ours[rows.valid_tokens].all()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        exactly(ours.grad, theirs.grad, rtol=0, atol=1e-10)


TURN = st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans())  # drawn, said, whether it rewrites


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(TURN, max_size=4)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 4),
)
def test_every_prediction_reads_its_own_context_and_nothing_else(
    rows: list[tuple[int, list[tuple[int, int, bool]]]], packed: bool, group_size: int
) -> None:
    token, prompts, numbers, read = 100, list[list[int]](), list[list[int]](), dict[int, list[int]]()
    groups = [number // group_size for number in range(len(rows))]
    for group, (_, turns) in zip(groups, rows, strict=True):
        prompts.append(list(range(10 * group, 10 * group + rows[group * group_size][0])))
        numbers, context = [*numbers, []], list(prompts[-1])
        for turn, (drawn, said, rewrites) in enumerate(turns, 1):
            for number in [turn] * drawn + [-turn if rewrites else 0] * said:
                if number == -turn and numbers[-1][-1] == turn:
                    context = []
                if number > 0:
                    read[token] = list(context)
                numbers[-1].append(number)
                context.append(token)
                token += 1
    ends = list(accumulate(map(len, numbers), initial=100))
    responses = [list(range(*ends[row : row + 2])) for row in range(len(rows))]
    actions = [[number > 0 for number in row] for row in numbers]
    rollout = Rollout.of_samples(prompts, responses, groups=groups, actions=actions)
    turns_of_tokens = pad_rows([torch.tensor(row) for row in numbers], torch.int64)[0]
    segments = segments_of(turns_of_tokens, rollout.response_lengths)
    layout = pack(rollout.replace(segments=segments), packed=packed)
    ids, positions = layout.input_ids.flatten(), layout.position_ids.flatten()
    contexts = [ids[place - int(position) : place + 1] for place, position in enumerate(positions)]
    if layout.shared is not None:
        keys, starts = ids[layout.shared.keys], accumulate((number for _, number in layout.lengths), initial=0)
        reads = [
            keys[start : start + number - asked + query + 1]
            for (asked, number), start in zip(layout.lengths, starts, strict=False)
            for query in range(asked)
        ]
        contexts = [reads[query] for query in layout.shared.outputs]
        assert torch.equal(layout.shared.queries[layout.shared.outputs], torch.arange(len(ids)))
        assert len(ids) == len(reads) <= len(keys)
    found = {int(target): contexts[place].tolist() for target, place in zip(layout.targets, layout.source, strict=True)}
    assert found == read


def test_a_sequence_of_a_row_begins_at_position_0_and_ends_before_its_last_token() -> None:
    layout = pack(with_contexts())
    assert [keys for _, keys in layout.lengths] == [3, 3, 2, 2, 2, 4]
    assert layout.input_ids.tolist() == [[2, 3, 7, 9, 2, 3, 4, 11, 4, 13, 5, 6, 5, 6, 3, 7]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3]]
    assert layout.source.tolist() == [1, 2, 5, 6, 7, 8, 9, 11, 15]
    assert layout.shape == (3, 9), "a sample stays one row"
    assert pack(with_contexts(), packed=False).input_ids.shape == (6, 4)


def test_a_prompt_is_among_the_inputs_once_for_its_group() -> None:
    prompts, responses = [[2, 3], [2, 3], [4], [2, 3]], [[7, 8], [9, 10, 11], [5, 6], [12]]
    layout = pack(Rollout.of_samples(prompts, responses, groups=[0, 0, 1, 2]))
    assert layout.input_ids.tolist() == [[2, 3, 7, 9, 10, 4, 5, 2, 3]], "another group has its own"
    assert layout.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1, 0, 1]]
    assert layout.source.tolist() == [1, 2, 1, 3, 4, 5, 6, 8], "its last token predicts for both samples"
    assert layout.shared is not None
    assert layout.lengths == ((3, 3), (2, 4), (2, 2), (2, 2)), "queries of further tokens, keys of whole sequences"
    assert layout.shared.keys.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8]
    assert layout.shared.queries.tolist() == layout.shared.outputs.tolist() == list(range(9))


def test_a_response_of_one_token_has_no_query() -> None:
    layout = pack(Rollout.of_samples([[2, 3]] * 3, [[7], [8, 9], [10]], groups=[0] * 3))
    assert layout.input_ids.tolist() == [[2, 3, 8]] and layout.lengths == ((2, 2), (1, 3))


def test_a_prompt_with_other_extras_is_not_shared() -> None:
    rows = Rollout.of_samples([[2, 3]] * 3, [[7, 8], [9], [5]], groups=[0, 0, 0])
    extras = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 5]], [[1, 2], [3, 4]]])
    assert pack(rows).input_ids.tolist() == [[2, 3, 7]]
    assert pack(rows.replace(prompt_extras={"routes": extras})).input_ids.tolist() == [[2, 3, 7, 2, 3]]


def test_a_context_that_begins_with_a_drawn_token_is_refused() -> None:
    rows = with_contexts()
    with pytest.raises(ValueError, match="expected a context to begin with tokens that were read, got a sampled"):
        pack(rows.replace(valid_tokens=torch.arange(rows.width) < rows.response_lengths[:, None]))


@forms
def test_a_valid_token_in_the_padding_is_refused(packed: bool) -> None:
    rows = Rollout.of_samples([[2], [2, 3]], [[7, 8], [9]], groups=[0, 1])
    message = "got position 1 of row 1, whose response has 1 tokens"
    with pytest.raises(ValueError, match=message):
        pack(rows.replace(valid_tokens=torch.ones_like(rows.valid_tokens)), packed=packed)


@forms
def test_positions_outside_of_the_valid_tokens_are_zero(packed: bool) -> None:
    rows = rows_with_everything()
    logprobs, entropy, values, *_ = policy_of(tiny_model("qwen2"), packed=packed)(pack(rows, packed=packed))
    for tensor in (logprobs, entropy, values):
        assert not tensor[~rows.valid_tokens].any() and tensor[rows.valid_tokens].all()


def test_packed_inputs_hold_no_padding_and_leave_out_the_last_token() -> None:
    rows = rows_with_everything()
    rows = rows.replace(groups=torch.arange(len(rows)))
    layout = pack(rows, packed=True)
    lengths = (rows.prompt_lengths + rows.response_lengths - 1).clamp(min=1)
    assert layout.lengths == tuple((length, length) for length in lengths.tolist())
    assert layout.input_ids.shape == layout.position_ids.shape == (1, lengths.sum())
    positions = [place for length in lengths.tolist() for place in range(length)]
    assert layout.position_ids.tolist() == [positions], "each sequence begins at 0, for models with absolute positions"
    assert layout.cu_keys.tolist() == layout.cu_queries.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert len(layout.targets) == int(rows.valid_tokens.sum())


def test_padding_rows_alone_pass_through_with_a_gradient_of_zero() -> None:
    for packed in (True, False):
        policy = policy_of(tiny_model("qwen2"), packed=packed)
        found = together(policy, ragged_rollout(dtype=torch.float64).padding_rows(1), packed=packed)
        assert not any(gradient.any() for gradient in found.gradient)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("reentrant", [False, True])
@some_rows
def test_activation_checkpointing_gives_the_same_gradient(rows: Rollout, family: str, reentrant: bool) -> None:
    plain, saving = (policy_of(tiny_model(family), packed=True).train() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in the oldest transformers we support
        saving.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    exactly(together(saving, rows, packed=True), together(plain, rows, packed=True), rtol=0, atol=1e-12)


def greedily_continued(policy: PolicyModel, prompts: Tensor) -> list[list[int]]:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    generate: Callable[..., Tensor] = policy.model.generate  # pyrefly: ignore[bad-assignment]
    return generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()


def test_the_model_decodes_as_before_between_two_packed_forwards() -> None:
    rows, policy = rows_with_everything(), policy_of(tiny_model("gemma3_text"), packed=True)
    other = policy_of(tiny_model("gemma3_text"), packed=False)
    prompt = torch.tensor([[0, 5, 6], [7, 8, 9]])
    first = together(policy, rows, packed=True)
    assert greedily_continued(policy, prompt) == greedily_continued(other, prompt)
    exactly(together(policy, rows, packed=True), first, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2_moe"], ids=["attention-is-told", "only-the-mask-is-told"])
def test_a_sliding_window_wider_than_the_rows_of_the_check_is_kept_or_refused(family: str) -> None:
    layers = ["sliding_attention", "full_attention"]
    model = tiny_model(family, use_sliding_window=True, sliding_window=9, layer_types=layers)
    check_scoring(model, packed=False)
    rows = ragged_rollout(6, longest=24, dtype=torch.float64)
    expected = alone(policy_of(model, packed=False), rows)
    found, refused = expected, ""
    try:
        found = together(policy_of(model, packed=True), rows, packed=True)
    except ValueError as error:
        refused = str(error)
    assert not refused or "packing=False" in refused
    exactly(found.logprobs, expected.logprobs, rtol=0, atol=1e-6)


def test_attention_with_a_soft_cap_raises_and_says_what_to_do() -> None:
    policy = policy_of(tiny_model("gemma2"), packed=True)
    with pytest.raises(ValueError, match="softcap: use packing=False"):
        policy(pack(rows_with_everything(), packed=True))


def test_layers_that_drop_the_boundaries_raise_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_model("qwen2"), packed=True)
    drop_arguments(policy, monkeypatch)
    with pytest.raises(ValueError, match="Qwen2Attention drops the sequence boundaries: use packing=False"):
        policy(pack(rows_with_everything(), packed=True))


def drop_arguments(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = policy.model.get_submodule("model.layers.0.self_attn")
    forward = layer.forward

    def forgetful(hidden_states: Tensor, *, packed_sequences: object, **known: object) -> object:
        return forward(hidden_states, **known)

    monkeypatch.setattr(layer, "forward", forgetful)


def test_a_layout_moves_every_tensor() -> None:
    layout: Layout = pack(rows_of_groups()).to("meta")
    assert layout.shared is not None
    tensors = (layout.input_ids, layout.source, layout.rows, layout.cu_queries, layout.cu_keys, *layout.shared)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
