"""Forked contexts: each branch of a sample is read in one sequence, and each drawn token is predicted once."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, callback_of, keep_double, tiny_model
from kit.vision import PROCESSORS, picture, vision_model
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from lightning_rl import GSPO, FinishReason, Rollout, SamplingParams, ValueLoss
from lightning_rl.audit import forwards
from lightning_rl.audit.checks.sampling_checks import _Tokens
from lightning_rl.callbacks import DivergenceMask, EntropyBonus, OffPolicyIS
from lightning_rl.corrections import Stat
from lightning_rl.data.pictures import pixels_of
from lightning_rl.generation import Completion, Request
from lightning_rl.policy import Plan, PolicyModel, make_plan, pack
from lightning_rl.policy.plan import join_parts, plan_of_rows, row_of
from lightning_rl.policy.processor import PictureProcessor
from lightning_rl.policy.sequences import join_sequences, sequences_of
from lightning_rl.policy.text_model import freeze_towers
from lightning_rl.rollout import ROUTES, concatenate
from lightning_rl.samples import PROMPT, Media, Prompt, Trajectory
from lightning_rl.update import StepGradient, accumulate_gradient

forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
SAMPLING = SamplingParams(eos_token_ids=[1])


def trajectory_of(prompt: Sequence[int], group: int, sample: int, media: Media | None = None) -> Trajectory:
    row = Prompt(index=group, token_ids=tuple(prompt), content="", columns={}, media=media)
    request = Request(prefix_ids=tuple(prompt), sample_id=sample, seed=sample, sampling=SAMPLING, media=media)
    return Trajectory(prompt=row, request=request)


def answer(ids: Sequence[int], **options: Any) -> Completion:
    options = {"logprobs": torch.zeros(len(ids)), "finish": FinishReason.STOP, "version": 0, **options}
    return Completion(token_ids=tuple(ids), **options)


def prefix_of(made: Trajectory, parent: int | None) -> list[int]:
    """Token ids from the root to the end of a segment."""
    if parent is None or parent == PROMPT:
        return [] if parent is None else list(made.request.prefix_ids)
    return [*prefix_of(made, made.segments[parent].parent), *made.segments[parent].token_ids]


def tree(seed: int, made: Trajectory, pictures: Sequence[Prompt] = ()) -> Trajectory:
    """A random tree of up to 8 segments, with forks, retries, new roots and answers without tokens."""
    draw = random.Random(seed)
    while len(made.segments) < 7:
        parent = draw.choice([PROMPT, PROMPT, *range(len(made.segments)), None]) if made.segments else PROMPT
        shown = draw.choice([None, *pictures])
        read = draw.choices(range(2, 12), k=draw.randint(parent is None, 3)) if shown is None else shown.token_ids
        drawn = draw.choices(range(2, 12), k=draw.randint(0, 3))
        made = made.extend(parent, read, answer(drawn), None if shown is None else shown.media)
    return made


def trees(seed: int, dtype: torch.dtype = torch.float64) -> tuple[list[Trajectory], Rollout]:
    """Groups of two samples with one prompt, and a row without a fork."""
    prompts = [[2, 3], [4, 5, 6, 7], [8]]
    made = [tree(10 * seed + each, trajectory_of(prompts[each // 2], each // 2, each)) for each in range(5)]
    made.append(trajectory_of(prompts[2], 2, 5).extend(PROMPT, (), answer((3, 1))).extend(0, (9,), answer((4, 4))))
    rollout = Rollout.of(made, dtype=dtype, logprobs=True, turns=True)
    return made, concatenate([rollout, rollout.padding_rows(1)])


def is_forked(made: Trajectory) -> bool:
    parents = [segment.parent for segment in made.segments]
    return any(parent not in (None, place - 1) for place, parent in enumerate(parents))


def alone(model: PreTrainedModel, made: Sequence[Trajectory], rows: Rollout) -> Tensor:
    """Log-probability of each drawn token, each segment by the model's own forward on its path."""
    model.set_attn_implementation("sdpa")
    found = torch.zeros(rows.response_ids.shape, dtype=model.dtype)
    for row, sample in enumerate(made):
        begin = 0
        for segment in sample.segments:
            size = len(segment.token_ids)
            if segment.sampled and size:
                before = prefix_of(sample, segment.parent)
                ids = torch.tensor([[*before, *segment.token_ids]])
                logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
                found[row, begin : begin + size] = logits.log_softmax(-1).gather(1, ids[0, len(before) :, None])[:, 0]
            begin += size
    return found


def slopes_of(rows: Rollout, width: int) -> Tensor:
    """A weight for each token of a sample, wherever its row is."""
    columns = torch.arange(width, dtype=torch.float64)
    return (columns + 3 * rows.sample_ids[:, None].double()).sin()


def gradient(model: PreTrainedModel, logprobs: Tensor, rows: Rollout) -> Tensor:
    (logprobs * slopes_of(rows, logprobs.shape[1])).sum().backward()
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in grads])


@forms
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_drawn_token_has_the_log_probability_and_the_gradient_of_its_own_path(
    family: str, seed: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_double(monkeypatch)
    (made, rows), model = trees(seed), tiny_model(family).double()
    assert sum(map(is_forked, made)) >= 3
    expected = alone(model, made, rows)
    theirs = gradient(model, expected, rows)
    policy = PolicyModel(model, None, temperature=1.0, packed=packed)
    ours = policy(pack(rows, packed=packed)).logprobs
    assert_close(ours, expected, atol=1e-9, rtol=0)
    assert ours[rows.valid_tokens].all() and not ours[~rows.valid_tokens].any()
    assert_close(gradient(model, ours, rows), theirs, atol=1e-9, rtol=0)
    order = torch.tensor([4, 1, 5, 0, 3, 2])
    total = torch.zeros_like(theirs)
    for part in (order[:1], order[1:4], order[4:]):
        some = rows.select(part)
        total += gradient(model, policy(pack(some, packed=packed)).logprobs, some)
    assert_close(total, theirs, atol=1e-9, rtol=0)


def test_single_precision_keeps_the_log_probabilities_of_each_path() -> None:
    (made, rows), model = trees(3, torch.float32), tiny_model("qwen2").float()
    expected = alone(model, made, rows)
    for packed in (True, False):
        ours = PolicyModel(model, None, temperature=1.0, packed=packed)(pack(rows, packed=packed)).logprobs
        assert_close(ours, expected, atol=1e-5, rtol=0)


def forked(contexts: int) -> Rollout:
    """A sample whose prompt is answered by two tokens, after which other programs read it several times."""
    made = trajectory_of([2, 3, 4], 0, 0).extend(PROMPT, (), answer((5, 6)))
    for place in range(contexts):
        made = made.extend(0, (7 + place,), answer(()))
    return Rollout.of([made], logprobs=True, turns=True)


def test_the_gradient_of_a_token_does_not_depend_on_how_many_contexts_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_double(monkeypatch)
    model = tiny_model("qwen2").double()
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    once, *more = (
        gradient(model, policy(pack(rows)).logprobs, rows) for rows in (forked(0), forked(1), forked(2), forked(4))
    )
    assert once.any()
    for other in more:
        assert_close(other, once, atol=1e-9, rtol=0)


def test_sequences_are_branches_in_the_order_of_leaves() -> None:
    made = trajectory_of([2, 3], 0, 0).extend(PROMPT, (), answer((4, 5)))  # segment 0
    made = made.extend(0, (6,), answer((7,)))  # 1, 2
    made = made.extend(0, (), answer((8, 9)))  # 3, a second answer
    made = made.extend(None, (10,), answer((11,)))  # 4, 5
    made = made.extend(4, (), answer((3,)))  # 6
    made = made.extend(2, (), answer((5,)))  # 7
    rows = Rollout.of([made, made], logprobs=True, turns=True)
    sequences = sequences_of(rows)
    ids, inside = join_sequences(rows, rows.prompt_ids, rows.response_ids)
    expected = [[2, 3, 4, 5, 8], [10], [10], [2, 3, 4, 5, 6, 7]]
    assert [line[mask].tolist() for line, mask in zip(ids, inside, strict=True)] == 2 * expected
    assert sequences.row.tolist() == [0] * 4 + [1] * 4
    assert sequences.lender.tolist() == [0, 1, 2, 0, 0, 5, 6, 0], "the prompt is in the inputs once"
    layout = pack(rows)
    assert layout.input_ids.tolist() == [[2, 3, 4, 5, 8, 10, 10, 4, 5, 6, 7, 4, 5, 8, 10, 10, 4, 5, 6, 7]]
    assert layout.targets.tolist() == rows.response_ids[rows.valid_tokens].tolist()
    plain = Rollout.of([trajectory_of([2], 0, 0).extend(PROMPT, (), answer((4,)))], logprobs=True, turns=True)
    assert sequences_of(plain).places is None


@forms
def test_a_budget_counts_every_branch(packed: bool) -> None:
    rows = concatenate([trees(1)[1], trees(2)[1]]).replace(sample_ids=torch.arange(14), groups=torch.arange(14) // 2)
    rows = rows.replace(trained=rows.real & (rows.response_lengths > 0))
    plan = make_plan(rows, minibatches=1, max_tokens_per_microbatch=90, packed=packed)
    assert len(plan.step(0)) > 1
    for microbatch in plan.step(0):
        assert microbatch.layout.input_ids.numel() <= 90 or len(microbatch.index) == 1


def test_routes_follow_the_branches() -> None:
    made = trajectory_of([2, 3], 0, 0)

    def said(ids: Sequence[int], first: int, size: int) -> Completion:
        routes = torch.arange(first, first + size + len(ids), dtype=torch.int16)[:, None, None] + 1
        return answer(ids, prompt_extras={ROUTES: routes[:size]}, token_extras={ROUTES: routes[size:]})

    made = made.extend(PROMPT, (), said((4, 5), 0, 2))
    made = made.extend(0, (6,), said((7,), 10, 5))
    made = made.extend(0, (8,), said((9,), 20, 5))
    rows = Rollout.of([made], logprobs=True, turns=True, recorded=(ROUTES,))
    joined, _ = join_sequences(rows, rows.prompt_extras[ROUTES], rows.token_extras[ROUTES])
    assert joined.flatten(1).tolist() == [[1, 2, 3, 14, 15], [1, 2, 3, 14, 25]], "that of token 5 as it was first read"


def test_the_audit_forms_the_same_contexts_and_prefixes() -> None:
    made, rows = trees(5)
    contexts = forwards.contexts_of(rows)
    expected = [prefix_of(sample, path[-1]) for sample in made for path in sample.branches()]
    assert [one.ids.tolist() for one in contexts if len(one.columns)][: len(expected)] == [
        ids for ids in expected if len(ids) > 1
    ]
    first = torch.zeros_like(rows.response_ids)
    for one in contexts:
        first[one.row].index_add_(0, one.columns, one.first.long())
    assert torch.equal(first[rows.valid_tokens], torch.ones(int(rows.valid_tokens.sum()), dtype=torch.int64))
    tokens = _Tokens.of(rows)
    for row, sample in enumerate(made):
        pairs: list[Any] = []
        for segment in (segment for segment in sample.segments if segment.sampled):
            request = replace(sample.request, prefix_ids=tuple(prefix_of(sample, segment.parent)))
            pairs.append((request, answer(segment.token_ids)))
        assert tokens.wrong(row, pairs) == ""
        other = replace(pairs[-1][0], prefix_ids=(*pairs[-1][0].prefix_ids[:-1], 0))
        assert tokens.wrong(row, [*pairs[:-1], (other, pairs[-1][1])]) == "prefix of each turn"


@forms
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "llava_next"])
def test_pictures_of_a_shared_part_are_read_by_each_branch(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_double(monkeypatch)
    processor, model = PictureProcessor(PROCESSORS[family]()), vision_model(family).double()
    freeze_towers(model)
    red, blue = pixels_of(picture("red"), "a picture"), pixels_of(picture("blue", (84, 56)), "a picture")
    shown = [processor.prompt([red], "what"), processor.prompt([blue, red], "color")]
    made = [
        tree(40 + each, trajectory_of(shown[each // 2].token_ids, each // 2, each, shown[each // 2].media), shown)
        for each in range(4)
    ]
    rows = Rollout.of(made, dtype=torch.float64, logprobs=True, turns=True)
    policy = PolicyModel(model, None, temperature=1.0, packed=packed)
    with torch.no_grad():
        together = policy(pack(rows, packed=packed)).logprobs
        for row, sample in enumerate(made):
            begin = 0
            for segment in sample.segments:
                size, parent = len(segment.token_ids), segment.parent
                if segment.sampled and size:
                    kept = trajectory_of(prefix_of(sample, parent), 0, 0, sample.media_of(parent, (), None))
                    one = Rollout.of([kept.extend(PROMPT, (), answer(segment.token_ids))])
                    expected = policy(pack(one, packed=False)).logprobs[0]
                    assert_close(together[row, begin : begin + size], expected, atol=1e-9, rtol=0)
                begin += size


def long_sample(contexts: int, length: int) -> Rollout:
    """A sample of contexts with a number of drawn tokens each, one after the other, and a short row of its group."""
    made = trajectory_of([2, 3, 4], 0, 0)
    for place in range(contexts):
        made = made.extend(None if place else PROMPT, (5, 6, 7) if place else (), answer((8,) * length))
    short = trajectory_of([2, 3, 4], 0, 1).extend(PROMPT, (), answer((8, 9)))
    return Rollout.of([made, short], dtype=torch.float64, logprobs=True, turns=True)


def step(rows: Rollout, plan: Plan, *, packed: bool, **options: Any) -> tuple[Tensor, StepGradient]:
    """The gradient of an optimizer step with the policy's first outputs as old ones."""
    model = tiny_model("qwen2").double()
    policy = PolicyModel(model, model, temperature=1.0, packed=packed)
    rows = rows.replace(advantages=slopes_of(rows, rows.width).masked_fill(~rows.valid_tokens, 0))
    rows = rows.replace(
        old_logprobs=rows.require("advantages") / 9 - 2, values=rows.advantages, returns=rows.advantages
    )
    made = accumulate_gradient(
        rows,
        plan.step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm([EntropyBonus(0.1), OffPolicyIS()], value_loss=ValueLoss(coef=0.5), **options),
        backward=lambda loss: loss.backward(),
    )
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]), made


@forms
@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_a_row_in_different_microbatches_give_the_same_gradient(
    seed: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_double(monkeypatch)
    rows = trees(seed)[1]
    whole, divided = (
        make_plan(rows, minibatches=1, max_tokens_per_microbatch=budget, packed=packed, by_sequence=True)
        for budget in (10_000, 12)
    )
    assert len(whole.step(0)) == 1 < len(divided.step(0)) and any(microbatch.parts for microbatch in divided.step(0))
    again = plan_of_rows(rows, json.loads(json.dumps(divided.rows())), packed=packed)
    assert again.rows() == divided.rows() and whole.tokens(0) == divided.tokens(0)
    assert join_parts(divided.rows()) != divided.rows()
    for microbatch in divided.step(0):
        assert microbatch.layout.longest <= max(12, sequences_of(rows).lengths.max())
    (expected, one), (found, several) = (step(rows, plan, packed=packed) for plan in (whole, again))
    assert expected.any()
    assert_close(found, expected, atol=1e-9, rtol=0)
    for name, part in one.parts.items():
        assert_close(several.parts[name], part, atol=1e-9, rtol=0)
    for name in one.stats[0]:
        assert_close(several.joint(name), one.joint(name), atol=1e-9, rtol=0)
    split = [sum(row_of(entry) == row for m in divided.rows()[0] for entry in m) for row in range(6)]
    assert max(split) > 1 and divided.rows_of_step(0).tolist() == [row for row in range(6) if split[row]]


def test_a_loss_with_a_value_for_each_row_gets_whole_rows() -> None:
    rows = trees(1)[1]
    divided = make_plan(rows, minibatches=1, max_tokens_per_microbatch=12, by_sequence=True)
    with pytest.raises(ValueError, match="expected whole rows for a loss or correction that is not token_wise"):
        step(rows, divided, packed=True, loss=GSPO())
    counts_rows = callback_of("own", metrics=lambda view: {"own/rows": Stat.of(view.trained, view.trained)})
    assert not an_algorithm(loss=GSPO()).token_wise and not an_algorithm([counts_rows]).token_wise
    assert (
        an_algorithm([EntropyBonus(0.1)]).token_wise
        and not an_algorithm([DivergenceMask(1.0, level="mean")]).token_wise
    )


@forms
def test_five_contexts_need_no_more_memory_than_one(packed: bool) -> None:
    peaks, inputs, limits = list[int](), list[int](), list[tuple[float, float]]()
    for contexts in (1, 5):
        rows = long_sample(contexts, 40)
        plan = make_plan(rows, minibatches=1, max_tokens_per_microbatch=45, packed=packed, by_sequence=True)
        model = tiny_model("qwen2")
        policy = PolicyModel(model, None, temperature=1.0, packed=packed)
        weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
        for microbatch in plan.step(0):
            saved = list[Tensor]()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one, kept=saved: kept.append(one) or one, lambda one: one
            ):
                outputs = policy(microbatch.layout)
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
            peaks.append(sum(size for place, size in storages.items() if place not in weights))
            inputs.append(microbatch.layout.input_ids.numel())
            outputs.logprobs.sum().backward()
        limits.append((1.1 * max(peaks), 1.1 * max(inputs)))
    assert max(peaks) <= limits[0][0] and max(inputs) <= limits[0][1]
