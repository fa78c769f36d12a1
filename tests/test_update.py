"""An optimizer step with a table of outputs, and the traces of observers."""

import warnings
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, callback_of, differing, fit, ragged_rollout, tiny_module, tiny_policy, weights_of
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import (
    FakeEngine,
    LossTerm,
    LossView,
    RLCallback,
    RLLightningModule,
    Rollout,
    ValueLoss,
    sequence_mean,
)
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, ReferenceKL, RolloutKL
from lightning_rl.corrections import StepTrace
from lightning_rl.policy import Outputs, PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.update import accumulate_gradient, from_table

CUTS = [[list(range(12))], [[5], [0, 11, 3, 4, 2, 7, 8], [1, 10], [6, 9]], [[0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9]]]
cuts = pytest.mark.parametrize("cut", CUTS, ids=["one", "unequal", "with-padding"])


def a_rollout() -> Rollout:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    draw = torch.Generator().manual_seed(4)
    noise = torch.randn(2, *rollout.response_ids.shape, generator=draw, dtype=torch.float64)
    return rollout.replace(values=noise[0], returns=noise[1]).sanitize()


def algorithm() -> Algorithm:
    callbacks: list[RLCallback] = [ReferenceKL(0.1, as_loss=True), RolloutKL(0.2), EntropyBonus(0.3)]
    return an_algorithm(callbacks, reduction=sequence_mean, value_loss=ValueLoss(coef=0.5))


def a_policy() -> PolicyModel:
    model = tiny_policy(dtype=torch.float64)
    return PolicyModel(model, model, temperature=0.7, packed=True)


def table_of(policy: PolicyModel, rollout: Rollout) -> Outputs:
    """Return the outputs of the policy for every row of the rollout, [B, T]."""
    (whole,) = plan_of_rows(rollout, [CUTS[0]]).step(0)
    outputs = policy(whole.layout)
    assert outputs.values is not None
    missing = (0, rollout.width - outputs.logprobs.shape[1])
    logprobs, entropy, values = (
        functional.pad(part, missing) for part in (outputs.logprobs, outputs.entropy, outputs.values)
    )
    return Outputs(logprobs, entropy, values)


def gradient_of(policy: PolicyModel) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


@cuts
def test_a_table_in_the_place_of_the_policy_gives_its_loss_its_metrics_and_its_gradient(cut: list[list[int]]) -> None:
    rollout, policy, through_table = a_rollout(), a_policy(), a_policy()
    microbatches = plan_of_rows(rollout, [cut]).step(0)
    expected = accumulate_gradient(
        rollout,
        microbatches,
        lambda microbatch: policy(microbatch.layout),
        algorithm(),
        backward=lambda loss: loss.backward(),
    )
    table = table_of(through_table, rollout)
    found = accumulate_gradient(
        rollout, microbatches, from_table(table), algorithm(), backward=lambda loss: loss.backward(retain_graph=True)
    )
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert_close(found.parts[name], part, atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(found.stats, expected.stats, strict=True):
        assert ours.keys() == theirs.keys()
        for name, stat in theirs.items():
            assert_close(ours[name].moments, stat.moments, atol=1e-12, rtol=1e-12)
    assert_close(gradient_of(through_table), gradient_of(policy), atol=1e-12, rtol=1e-10)


@cuts
def test_a_trace_keeps_outputs_parts_and_the_gradient_that_autograd_has(cut: list[list[int]]) -> None:
    rollout, policy = a_rollout(), a_policy()
    plain = table_of(policy, rollout)
    leaf = plain.logprobs.detach().clone().requires_grad_()
    table = Outputs(leaf, plain.entropy.detach(), None if plain.values is None else plain.values.detach())
    microbatches, trace = plan_of_rows(rollout, [cut]).step(0), StepTrace(rollout_number=3, step=1)
    step = accumulate_gradient(
        rollout, microbatches, from_table(table), algorithm(), backward=lambda loss: loss.backward(), trace=trace
    )
    assert leaf.grad is not None and len(trace.microbatches) == len(microbatches)
    for seen, microbatch in zip(trace.microbatches, microbatches, strict=True):
        index, width = microbatch.index, microbatch.layout.shape[1]
        assert not seen.view.logprobs.requires_grad
        if not len(index):
            assert not seen.gradient.any() and not seen.view.valid_tokens.any()
            continue
        assert torch.equal(seen.gradient, leaf.grad[index, :width]) and seen.gradient.any()
        assert torch.equal(seen.view.logprobs, leaf.detach()[index, :width])
        assert torch.equal(seen.view.entropy, table.entropy[index, :width])
        assert torch.equal(seen.view.sample_ids, rollout.sample_ids[index])
    for name, part in step.parts.items():
        assert_close(torch.stack([seen.parts[name] for seen in trace.microbatches]).sum(), part)


def test_a_trace_changes_no_bit_of_the_step() -> None:
    gradients = []
    for trace in (None, StepTrace(rollout_number=0, step=0)):
        rollout, policy = a_rollout(), a_policy()
        accumulate_gradient(
            rollout,
            plan_of_rows(rollout, [CUTS[1]]).step(0),
            lambda microbatch, policy=policy: policy(microbatch.layout),
            algorithm(),
            backward=lambda loss: loss.backward(),
            trace=trace,
        )
        gradients.append(gradient_of(policy))
    assert torch.equal(*gradients)


class Observer(RLCallback):
    """Keeps the steps that it wants, and for which ones it was asked."""

    name = "observer"

    def __init__(self, *, every: int = 1) -> None:
        self.every = every
        self.asked: list[int] = []
        self.traces: list[StepTrace] = []

    @override
    def traces_step(self, rollout_number: int, step: int) -> bool:
        self.asked.append(2 * rollout_number + step)
        return (2 * rollout_number + step) % self.every == 0

    @override
    def observe_step(self, trace: StepTrace) -> None:
        self.traces.append(trace)


def sum_reward(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Another one for almost every response, so that every step has a gradient."""
    return [float(sum(ids)) for ids in completion_ids]


def train(*callbacks: RLCallback, **options: Any) -> RLLightningModule:
    module = tiny_module(
        **{"minibatches_per_rollout": 2, "max_tokens_per_microbatch": 40, "rewards": sum_reward, **options}
    )
    fit(module, callbacks=[ReferenceKL(0.1, as_loss=True), *callbacks])
    return module


@pytest.mark.nightly
def test_looking_on_changes_no_bit_of_a_run() -> None:
    plain, observed = weights_of(train()), weights_of(train(Observer()))
    assert [name for name, weight in plain.items() if not torch.equal(observed[name], weight)] == []


def test_every_optimizer_step_is_shown_once_with_its_figures() -> None:
    observer = Observer()
    train(observer)
    assert [(trace.rollout_number, trace.step) for trace in observer.traces] == [
        (n, k) for n in range(4) for k in (0, 1)
    ]
    for trace in observer.traces:
        assert trace.made and trace.scale == 1.0 and trace.norm is not None and float(trace.norm) > 0
        assert len(trace.microbatches) > 1
        assert len(trace.logged["policy/entropy"]) == len(trace.microbatches)
        assert len(trace.logged["loss/total"]) == len(trace.logged["reward/task"]) == 1
        total = torch.stack([seen.parts["loss/total"] for seen in trace.microbatches]).double().sum()
        assert float(trace.logged["loss/total"][0][1]) == pytest.approx(float(total), abs=1e-9)


def test_only_the_steps_that_somebody_wants_are_traced() -> None:
    observer, other = Observer(every=3), Observer().with_name("other")
    train(other, observer)
    assert [2 * trace.rollout_number + trace.step for trace in observer.traces] == [0, 3, 6]
    assert observer.asked == list(range(8)), "once for each step, also if another one wants it"


@pytest.mark.filterwarnings("ignore:rollout . taught the policy nothing")
def test_a_step_without_a_valid_token_has_no_norm_and_no_microbatches() -> None:
    observer = Observer()
    engine = FakeEngine(lambda request: [5] * request.sampling.max_new_tokens)
    module = tiny_module(engine=engine)
    fit(module, callbacks=[NoEOSMask("drop_tokens"), observer])
    assert module.run.progress.skipped == len(observer.traces) == 4
    assert all(trace.norm is None and not trace.microbatches and not trace.made for trace in observer.traces)


def test_requests_and_rewards_are_shown_in_the_order_in_which_they_come() -> None:
    seen: list[tuple[str, Any]] = []
    generated = callback_of("generated", observe_generated=lambda pairs: seen.append(("generated", pairs)))
    rewarded = callback_of("rewarded", observe_rewards=lambda rollout: seen.append(("rewards", rollout)))
    fit(tiny_module(), callbacks=[generated, rewarded], max_steps=2)
    assert [what for what, _ in seen] == ["generated", "rewards"] * 2
    for (_, pairs), (_, rollout) in zip(seen[::2], seen[1::2], strict=True):
        assert [request.sample_id for request, _ in pairs] == rollout.sample_ids.tolist()
        lengths = [len(completion.token_ids) for _, completion in pairs]
        assert lengths == rollout.response_lengths.tolist()
        assert rollout.rewards.tolist() == [float(length % 2) for length in lengths]


def test_a_loss_without_a_gradient_is_named() -> None:
    def without_gradient(view: LossView) -> Tensor:
        return -view.logprobs.detach() * view.require("advantages")

    with pytest.raises(
        ValueError, match="expected a loss with a gradient, got none: compute the loss without_gradient from"
    ):
        fit(tiny_module(loss=without_gradient))


def in_no_grad(view: LossView) -> Tensor:
    with torch.no_grad():
        return view.logprobs.square()


@pytest.mark.parametrize(
    ("per_token", "warned"),
    [
        (lambda view: view.logprobs.detach(), 1),
        (lambda view: view.logprobs.data.square(), 1),
        (lambda view: torch.full_like(view.logprobs, view.logprobs.mean().item()), 1),
        (in_no_grad, 1),
        (lambda view: view.logprobs.square(), 0),
        (lambda view: torch.zeros_like(view.logprobs), 0),  # nothing to train, on purpose
    ],
)
@pytest.mark.parametrize("place", ["term", "loss"])
def test_the_first_step_warns_of_a_part_of_the_loss_without_a_gradient(place: str, per_token: Any, warned: int) -> None:
    pull = callback_of("pull", loss_term=lambda view: LossTerm(per_token=view.logprobs.square(), coef=0.1))
    other = callback_of("term", loss_term=lambda view: LossTerm(per_token=per_token(view), coef=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            tiny_module(**({"loss": per_token} if place == "loss" else {})),
            callbacks=[pull if place == "loss" else other],
        )
    name = "loss/policy" if place == "loss" else "term/loss"
    texts = [str(one.message) for one in caught if "expected a gradient of" in str(one.message)]
    texts = [text for text in texts if "on a fixed batch" not in text]
    assert len(texts) == warned and all(f"of {name}, got none" in text for text in texts)


def test_a_reward_that_turns_grad_mode_off_changes_nothing() -> None:
    def reward(completions: Any, **_: Any) -> list[float]:
        torch.set_grad_enabled(False)
        return [float(len(text)) for text in completions]

    def plain(completions: Any, **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    try:
        changed, same = (tiny_module(rewards={"length": function}) for function in (reward, plain))
        for module in (changed, same):
            fit(module)
    finally:
        torch.set_grad_enabled(True)
    assert differing(changed, same) == []
