"""Rows 1.01 to 1.13 of docs/evidence.md: silent bugs that other systems had and fixed."""

import math
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.support import (
    callback_of,
    fill_rollout,
    in_lockstep,
    ragged_rollout,
    rollout_of,
    run_step,
    sample_groups,
    tiny_policy,
    view_of,
)
from silent_bugs import G, collector_of, one_step, signal
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput

from lightning_rl import (
    GAE,
    ClippedSurrogate,
    EngineError,
    FakeEngine,
    FinishReason,
    PromptDataModule,
    SamplingParams,
    SequenceSumNorm,
    Stat,
    TransformersEngine,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from lightning_rl.advantages import ReinforcePlusPlus
from lightning_rl.callbacks import IcePop, ReferenceKL, TruncatedIS
from lightning_rl.corrections import Corrections
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion
from lightning_rl.policy import FrozenModel, PolicyModel, make_plan, pack
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.signal.shaped_rewards import shaped_rewards

NAN = math.nan
PLAIN = GAE(whitened=False)
WHOLE, CUTS = [range(12)], [[range(6), range(6, 12)], [[5], [0, 11, 3, 4, 2, 7, 8], [1, 10], [6, 9]], [range(12), []]]


def test_1_01_shaping_leaves_the_raw_kl_alone() -> None:
    rollout = rollout_of([1.0], [[1, 1, 1]], old_logprobs=[[0.5, 0.7, 0.9]], ref_logprobs=[[0.4, 0.5, 0.6]])
    before = [tensor.clone() for _, tensor in rollout.tensors()]
    for _ in range(2):
        advantages, logged = signal(rollout, PLAIN, ReferenceKL(0.05))
        assert_close(advantages, torch.tensor([[0.97, 0.975, 0.985]]), atol=1e-6, rtol=0)
        assert logged["kl/penalty"] == pytest.approx(0.05 * 0.2), "not the shaped reward, whose mean is 0.3233"
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(rollout.tensors(), before, strict=True))
    penalty = torch.tensor([[-0.1, -0.2, -0.3]])
    shaped_rewards(torch.tensor([1.0]), penalty, torch.ones(1, 3, dtype=torch.bool))
    assert torch.equal(penalty, torch.tensor([[-0.1, -0.2, -0.3]])), "estimators read the penalty itself, too"


def test_1_02_whitening_runs_over_all_ranks_and_every_rank_takes_part() -> None:
    rollout = rollout_of([1.0, 4.0, 9.0, 0.0], [[1, 1], [1, 0], [1, 1], [0, 0]])
    ranks = [torch.tensor(rows, dtype=torch.int64) for rows in ([0, 1], [2], [3], [])]
    calls = [0] * len(ranks)

    def rank(number: int) -> Any:
        def counted(total: Tensor) -> Tensor:
            calls[number] += 1
            return total

        signal(rollout.select(ranks[number]), GAE(), global_sum=counted)
        return lambda total: signal(rollout.select(ranks[number]), GAE(), global_sum=total)[0]

    parts = in_lockstep(*(rank(number) for number in range(len(ranks))))
    assert_close(torch.cat(parts), signal(rollout, GAE())[0])
    assert calls[0] > 0 and calls == calls[:1] * 4, "a rank without tokens joins every collective"


def test_1_03_dual_clip_reaches_the_loss() -> None:
    view = view_of(torch.tensor([2.0, 2.0, 0.5]).log(), old_logprobs=[0.0, 0.0, 0.0], advantages=[2.0, -2.0, 2.0])
    assert_close(ClippedSurrogate(dual_clip=1.5)(view).detach(), torch.tensor([[-2.4, 3.0, -1.0]]))
    assert_close(ClippedSurrogate()(view).detach(), torch.tensor([[-2.4, 4.0, -1.0]]))


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, prompt_mean, SequenceSumNorm(9)])
def test_1_04_tool_tokens_do_not_shrink_the_gradient(reduction: Any) -> None:
    plain = view_of([[-1.0, -1.0], [-1.0, -1.0]], advantages=[[1.0, 1.0], [2.0, 2.0]])
    tools = view_of([[-1.0] * 5] * 2, advantages=[[1.0] * 5, [2.0] * 5], valid=[[1, 0, 0, 0, 1], [0, 1, 0, 1, 0]])
    expected, found = (run_step(view, reduction=reduction).gradient for view in (plain, tools))
    assert_close(found[tools.valid_tokens], expected[plain.valid_tokens])


def test_1_05_the_gradient_is_that_of_the_whole_step_for_every_split_and_number_of_ranks() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    whole = one_step(rollout, WHOLE).gradient
    for cut in CUTS:
        assert_close(one_step(rollout, cut).gradient, whole)
    ranks = in_lockstep(
        lambda total: one_step(rollout, [range(3), range(3, 7)], global_sum=total).gradient,
        lambda total: one_step(rollout, [range(7, 12), []], global_sum=total).gradient,
    )
    assert_close(ranks[0] + ranks[1], whole)


@pytest.mark.parametrize("estimator", [ReinforcePlusPlus(gamma=0.5), GAE(whitened=False, gamma=0.5)])
@pytest.mark.parametrize("garbage", [7.0, NAN])
def test_1_06_a_penalty_at_a_masked_token_reaches_no_return(estimator: Any, garbage: float) -> None:
    rollout = rollout_of([1.0, 2.0], [[1, 0, 1, 0], [0, 1, 1, 1]])
    clean, spoiled = (
        callback_of("penalty", token_reward=lambda seen, fill=fill: torch.where(seen.valid_tokens, -0.5, fill))
        for fill in (0.0, garbage)
    )
    expected, logged = signal(rollout, estimator, clean)
    found, spoiled_logged = signal(rollout, estimator, spoiled)
    assert torch.equal(found, expected) and spoiled_logged == logged


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_1_07_every_source_of_log_probabilities_knows_the_temperature(temperature: float) -> None:
    model = tiny_policy(dtype=torch.float64)
    engine = TransformersEngine()
    launch(engine, model)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=6, eos_token_ids=[1])
    collector = collector_of(engine=engine, sampling=sampling, dtype=torch.float64)
    rollout = sample_groups(collector, [Prompt(0, (2, 3), None, {}), Prompt(1, (4,), None, {})])
    policy = PolicyModel(model, None, temperature=temperature, packed=True)
    reference = FrozenModel(model, temperature=temperature, packed=True)
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=99)
    found = add_logprobs(rollout, plan, policy, reference, Corrections(), old=True)
    engines = found.require("rollout_logprobs")
    assert_close(found.require("old_logprobs"), engines)
    assert_close(found.require("ref_logprobs"), engines)


def test_1_08_values_are_never_divided_by_the_temperature() -> None:
    class Counting(nn.Module):
        def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
            states = torch.arange(1.0, 1 + input_ids.numel()).reshape(*input_ids.shape, 1)
            return BaseModelOutput(last_hidden_state=states.expand(-1, -1, 32))

    model = tiny_policy()
    policy = PolicyModel(model, model, temperature=0.5, packed=True)
    assert policy.value_head is not None
    stub: Any = Counting()
    policy.critic = stub
    policy.value_head.weight.data = torch.eye(32)[:1]
    rows = rollout_of([0.0], [[1, 1]], prompt_ids=[[2, 3]], prompt_lengths=[2])
    assert policy(pack(rows)).values.tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_1_09_taking_sequences_apart_and_joining_them_is_the_identity_with_its_gradient(packed: bool) -> None:
    rows = ragged_rollout(24, seed=2)
    layout, valid = pack(rows, packed=packed), rows.valid_tokens
    last = rows.prompt_ids.gather(1, rows.prompt_lengths[:, None] - 1)
    previous = torch.cat([last, rows.response_ids], 1)[:, :-1]
    assert torch.equal(layout.input_ids.flatten()[layout.source], previous[valid]), "the token before each target"
    assert torch.equal(layout.scatter(layout.targets), rows.response_ids * valid)
    leaf = torch.randn(rows.response_ids.shape, requires_grad=True)
    joined = layout.scatter(leaf[valid])
    assert torch.equal(joined.detach(), leaf.detach() * valid)
    assert joined.requires_grad, "no filler without gradient"
    assert torch.equal(torch.autograd.grad((joined * 3).sum(), leaf)[0], 3.0 * valid)


def test_1_10_a_metric_of_correct_samples_joins_by_identity_and_not_by_position() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    rollout = rollout.replace(rewards=(torch.arange(12) % 3 == 1).double())

    def entropy(view: Any) -> dict[str, Stat]:
        return {"correct/entropy": Stat.of(view.entropy, view.valid_tokens & (view.rewards > 0)[:, None])}

    correct = callback_of("correct", metrics=entropy)
    expected = one_step(rollout, WHOLE, correct).metrics()["correct/entropy"]
    assert one_step(rollout, CUTS[1], correct).metrics()["correct/entropy"] == pytest.approx(expected)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = one_step(rollout.select(order), CUTS[0], correct).metrics()["correct/entropy"]
    assert shuffled == pytest.approx(expected)


def test_1_11_every_finished_group_is_trained_on_or_counted_as_filtered() -> None:
    keep = callback_of("keep", keep_groups=lambda seen: seen.groups % 3 != 1)
    data, collector = PromptDataModule([[2]] * 20, 1, shuffle=False), collector_of(keep)
    rollout, stats = fill_rollout(collector, data.take, 5)
    assert isinstance(collector.engine, FakeEngine)
    submitted = {request.sample_id // G for request in collector.engine.requests}
    kept = rollout.groups.unique().tolist()
    assert kept == [group for group in sorted(submitted) if group % 3 != 1] and len(rollout) == 5 * G
    assert len(submitted) == len(kept) + float(stats["groups/filtered"].value()) == data.position.cursor


def test_1_12_a_log_probability_is_missing_for_no_token() -> None:
    def short(request: Any) -> Completion:
        given = torch.full((4 - request.sample_id,), -1.0)
        return Completion(token_ids=(2,) * 4, logprobs=given, finish=FinishReason.LENGTH, version=6)

    with pytest.raises(EngineError, match="expected a log-probability for each of 4 tokens"):
        sample_groups(collector_of(script=short), [Prompt(0, (2,), None, {})])


def test_1_12_every_field_of_a_token_has_the_length_of_the_response() -> None:
    rollout = rollout_of([1.0], [[1, 1, 1]])
    for name in ("action_mask", "policy_version", "rollout_logprobs", "advantages"):
        with pytest.raises(ValueError, match=f"expected {name} of shape"):
            rollout.replace(**{name: torch.ones(1, 2)})


def test_1_13_metrics_count_the_population_before_rejection() -> None:
    ratio = torch.tensor([4.0, 1.0, 1.0, 1.0, 0.1])
    view = view_of([-1.0] * 5, old_logprobs=ratio.log(), rollout_logprobs=[0.0] * 5)
    logged = run_step(view, callbacks=[IcePop(0.5, 2.0), TruncatedIS(cap=2.0)]).metrics
    expected = {
        "ice_pop/rejected_tokens": 2 / 5,
        "ice_pop/ratio": 7.1 / 5,
        "ice_pop/ratio_max": 4.0,
        "truncated_is/capped": 1 / 5,
        "truncated_is/ratio": 7.1 / 5,
        "truncated_is/weight_mean": 5.1 / 5,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected)
