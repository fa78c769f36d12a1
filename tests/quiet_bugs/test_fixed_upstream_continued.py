"""Rows 1.14 to 1.25 of docs/evidence.md: silent bugs that other systems had and fixed."""

import math
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.support import callback_of, ragged_rollout, rollout_of, run_step, sample_groups, tiny_policy, view_of
from silent_bugs import collector_of, merged, one_step, signal
from torch.testing import assert_close

from lightning_rl import (
    GRPO,
    RLOO,
    FinishReason,
    LossTerm,
    RLCallback,
    Rollout,
    Stat,
    TransformersEngine,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from lightning_rl.callbacks import OPSM, ReferenceKL, RolloutKL
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion
from lightning_rl.losses import GMPO, GSPO, LOSSES
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import concatenate
from lightning_rl.rollouts.ahead import staleness
from lightning_rl.update import StepGradient

NAN = math.nan
PROMPT = [Prompt(0, (2, 3), None, {})]
WHOLE = [range(12)]
CUTS = [[[5], [0, 11, 3, 4, 2, 7, 8], [1, 10], [6, 9]], [range(6), range(6, 12)]]


def test_1_14_log_probabilities_of_the_engine_keep_their_precision() -> None:
    given = -torch.rand(6, generator=torch.Generator().manual_seed(0)) - 1
    said = Completion(token_ids=(2,) * 6, logprobs=given, finish=FinishReason.LENGTH, version=6)
    rollout = sample_groups(collector_of(script=lambda _: said), PROMPT)
    assert torch.equal(Rollout.from_state(rollout.state()).require("rollout_logprobs")[0], given)


def test_1_14_an_engine_in_half_precision_returns_log_probabilities_in_float32() -> None:
    engine = TransformersEngine()
    launch(engine, tiny_policy(dtype=torch.bfloat16))
    found = sample_groups(collector_of(engine=engine), PROMPT).require("rollout_logprobs")
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize(
    ("term", "other"),
    [
        pytest.param(RolloutKL(1.0), "rollout_logprobs", id="rollout"),
        pytest.param(ReferenceKL(1.0, estimator="k2", as_loss=True), "ref_logprobs", id="reference"),
    ],
)
def test_1_15_a_kl_term_alone_has_a_gradient(term: RLCallback, other: str) -> None:
    fields: dict[str, Any] = {other: [[-1.5, -2.0], [-1.0, -3.0]], "advantages": [[0.0] * 2] * 2}
    step = run_step(view_of([[-1.0, -2.0], [-1.0, -1.0]], valid=[[1, 1], [1, 0]], **fields), callbacks=[term])
    assert step.metrics[f"{term.name}/loss"] == pytest.approx(0.03125) == pytest.approx(float(step.loss))
    assert_close(step.gradient, torch.tensor([[0.125, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_1_15_the_slope_along_a_coefficient_is_the_logged_term(estimator: str) -> None:
    view = view_of([-1.0, -2.0], ref_logprobs=[-1.5, -1.0], advantages=[0.0, 0.0])
    one, three = (run_step(view, callbacks=[ReferenceKL(b, estimator=estimator, as_loss=True)]) for b in (1.0, 3.0))
    assert float(three.loss - one.loss) / 2 == pytest.approx(one.metrics["reference_kl/loss"])
    assert one.gradient.abs().min() > 0.1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, prompt_mean])
def test_1_16_neither_loss_nor_gradient_depends_on_the_size_of_a_microbatch(reduction: Any, loss: str) -> None:
    rollout = ragged_rollout(dtype=torch.float64, seed=5).sanitize()
    options: dict[str, Any] = {"reduction": reduction, "loss": LOSSES[loss]}
    whole = one_step(rollout, WHOLE, **options)
    for cut in CUTS:
        found = one_step(rollout, cut, **options)
        assert found.losses == pytest.approx(whole.losses, abs=1e-12)
        assert found.metrics() == pytest.approx(whole.metrics())
        assert_close(found.gradient, whole.gradient)


def test_1_17_a_logged_loss_is_the_sum_over_ranks_and_the_norm_is_no_sum() -> None:
    ranks = [StepGradient(parts={"loss/policy": torch.tensor(part)}) for part in (3.0, 5.0)]
    logged = [rank.metrics(2, norm=torch.tensor(0.7)) for rank in ranks]
    assert merged(*(stats["loss/policy"] for stats in logged)) == pytest.approx(8.0)
    assert merged(*(stats["optim/grad_norm"] for stats in logged)) == pytest.approx(0.7)


def test_1_18_an_advantage_stands_at_every_valid_token_of_its_own_row() -> None:
    rollout = ragged_rollout(12, seed=1)
    rewards = torch.tensor([0.0, 1.0, 5.0] * 4)
    rollout = rollout.replace(rewards=torch.where(rollout.groups == 1, 2.0, rewards))
    advantages, _ = signal(rollout, GRPO())
    assert torch.equal(advantages != 0, rollout.valid_tokens & (rollout.groups != 1)[:, None])


def test_1_19_not_even_a_term_that_is_nan_at_masked_tokens_leaks() -> None:
    def drift(view: Any) -> LossTerm:
        other = torch.where(view.valid_tokens, -1.5, NAN)
        return LossTerm(per_token=(view.logprobs - other).square(), coef=1.0)

    step = run_step(view_of([-1.0, -2.0, -3.0], valid=[1, 1, 0]), callbacks=[callback_of("drift", loss_term=drift)])
    assert step.metrics["drift/loss"] == pytest.approx(0.25) and math.isfinite(float(step.loss))
    assert step.gradient.isfinite().all() and step.gradient[0, 2] == 0


def test_1_20_padding_carries_exactly_the_fields_of_what_it_pads() -> None:
    rollout = ragged_rollout().replace(token_extras={"teacher": torch.ones(12, 7)}, extras={"level": torch.ones(12)})
    padding = rollout.padding_rows(2)
    assert [name for name, _ in padding.tensors()] == [name for name, _ in rollout.tensors()]
    assert not padding.valid_tokens.any() and not padding.trained.any() and not padding.rewarded.any()


def test_1_20_a_microbatch_without_a_valid_token_still_takes_part() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    masked = torch.arange(12)[:, None] >= 9
    rollout = rollout.replace(valid_tokens=rollout.valid_tokens & ~masked)
    whole, cut = (one_step(rollout, rows, OPSM(0.1)) for rows in (WHOLE, [range(9), range(9, 12), []]))
    assert [stats.keys() for stats in cut.stats] == [whole.stats[0].keys()] * 3, "the same metrics from everyone"
    assert cut.losses == pytest.approx(whole.losses) and cut.metrics() == pytest.approx(whole.metrics())


def test_1_21_every_field_follows_its_sample() -> None:
    rollout = ragged_rollout(dtype=torch.float64)
    routes = rollout.sample_ids[:, None, None].expand(12, 7, 2).double()
    rollout = rollout.replace(token_extras={"routes": routes}, extras={"sample": rollout.sample_ids})
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    replaced = concatenate([rollout.select(order[:5]), rollout.select(order[5:])])
    (step,) = plan_of_rows(replaced, [[[3, 1, 0], [7, 9]]]).minibatches
    for part in (rollout.select(order), replaced, *(microbatch.rows_of(replaced) for microbatch in step)):
        assert torch.equal(part.extras["sample"], part.sample_ids)
        assert (part.token_extras["routes"] == part.sample_ids[:, None, None]).all()


def test_1_21_a_pass_that_only_scores_leaves_nothing_behind() -> None:
    model, rollout = tiny_policy(dtype=torch.float64), ragged_rollout(dtype=torch.float64)
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    before = model(input_ids=rollout.prompt_ids).logits, policy(pack(rollout)).logprobs
    with torch.no_grad():
        policy(pack(ragged_rollout(seed=1)))
    after = policy(pack(rollout)).logprobs
    assert torch.equal(after, before[1])
    assert torch.equal(model(input_ids=rollout.prompt_ids).logits, before[0])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_1_22_a_log_probability_stands_where_its_token_stands(packed: bool) -> None:
    rollout, model = ragged_rollout(dtype=torch.float64).sanitize(), tiny_policy(dtype=torch.float64)
    alone = torch.zeros_like(rollout.require("old_logprobs"))
    for row in range(len(rollout)):
        prompt, length = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
        ids = torch.cat([rollout.prompt_ids[row, :prompt], rollout.response_ids[row, :length]])
        logits = model(input_ids=ids[None]).logits[0, prompt - 1 : prompt - 1 + length].detach()
        alone[row, :length] = logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
    policy = PolicyModel(model, None, temperature=1.0, packed=packed)
    found = policy(pack(rollout, packed=packed)).logprobs
    assert_close(found.detach(), alone * rollout.valid_tokens)
    empty = rollout.response_lengths == 0
    assert empty.any() and not found[empty].any()


def test_1_23_gradients_of_microbatches_add_up() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    first, second, both = (
        one_step(rollout, cut, reduction=lambda valid, *_: valid.double()).gradient
        for cut in ([range(5)], [range(5, 12)], [range(5), range(5, 12)])
    )
    assert first.abs().max() > 0 and second.abs().max() > 0
    assert_close(both, first + second)


def test_1_24_an_advantage_at_a_masked_token_is_in_no_mean() -> None:
    view = view_of([0.0] * 4, advantages=[1.0, 1.0, 10.0, 10.0], valid=[1, 1, 0, 0])
    assert GMPO()(view)[0, 0] == -1, "and not -11"
    assert all(float(run_step(view, loss=loss).loss) == -1 for loss in (GSPO(), GMPO(), GSPO(per_token=True)))
    bad = view_of([-1.0] * 4, advantages=[-1.0, -1.0, 10.0, 10.0], old_logprobs=[-0.1] * 4, valid=[1, 1, 0, 0])
    assert not OPSM(0.5).sequence_mask(bad).item(), "a mean advantage of -1, not of 9"


@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
def test_1_24_a_failed_sample_shifts_no_other_group(estimator: Any) -> None:
    groups, rewarded = [0] * 3 + [1] * 4 + [2] * 3, torch.arange(10) != 1

    def of(rewards: list[float]) -> torch.Tensor:
        return signal(rollout_of(rewards, [[1]] * 10, groups=groups).replace(rewarded=rewarded), estimator)[0]

    first = of([1.0, NAN, 0.0, 3.0, 5.0, 3.0, 5.0, 2.0, 2.0, 2.0])
    other = of([1.0, NAN, 0.0, 9.0, 5.0, -1.0, 5.0, 2.0, 2.0, 2.0])
    assert torch.equal(first[[0, 1, 2, 7, 8, 9]], other[[0, 1, 2, 7, 8, 9]])
    assert first[0] == -first[2] != 0 and not first[[1, 7, 8, 9]].any()


def test_1_25_the_version_of_a_token_is_pinned_when_its_request_is_sent() -> None:
    def overtaken(request: Any) -> Completion:
        pinned = collector.engine.version
        collector.engine.load_weights([], pinned + 1)
        return Completion(token_ids=(2, 3), logprobs=torch.zeros(2), finish=FinishReason.LENGTH, version=pinned)

    collector = collector_of(script=overtaken)
    rollout = sample_groups(collector, PROMPT, 9)
    assert rollout.fit_width(3).policy_version.tolist() == [[6, 6, -1], [7, 7, -1], [8, 8, -1]]
    assert [stat.value() for stat in staleness(rollout, 9).values()] == [2.0, 3.0]


def test_1_25_a_mean_is_a_global_sum_over_a_global_count() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 12.0])
    parts = [Stat.of(values[:3]), Stat.of(values[3:]), Stat.of(values[:0])]
    assert merged(*parts) == Stat.of(values).value() == 4.5
    assert merged(*(part.std() for part in parts)) == pytest.approx(float(values.std()))
