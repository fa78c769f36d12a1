"""Responses with tokens of tools: the model reads them, and they are neither scored, rewarded nor trained."""

import pytest
import torch
from kit.support import an_algorithm, tiny_policy
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GAE, GRPO, Reinforce, Rollout, token_mean
from lightning_rl.corrections import Corrections
from lightning_rl.policy import Plan, PolicyModel, make_plan
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.update import accumulate_gradient

PROMPTS = [[2, 3], [2, 3], [4], [4]]
RESPONSES = [[5, 6, 7, 8, 1], [9, 1], [5, 5, 6, 7], [10, 11, 1]]
ACTIONS = [[True, False, False, True, True], [True, True], [True, True, False, False], [False, True, True]]
forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def with_holes(responses: list[list[int]] = RESPONSES) -> Rollout:
    rollout = Rollout.of_samples(PROMPTS, responses, groups=[0, 0, 1, 1], actions=ACTIONS, dtype=torch.float64)
    rollout = rollout.replace(rewards=torch.tensor([1.0, 0.0, 3.0, 0.5], dtype=torch.float64))
    return exclude_rows(rollout, Corrections())[0]


def a_policy(*, packed: bool = True) -> PolicyModel:
    return PolicyModel(tiny_policy(dtype=torch.float64), None, temperature=0.7, packed=packed)


def scored(rollout: Rollout, *, packed: bool = True) -> tuple[Rollout, Plan, PolicyModel]:
    policy = a_policy(packed=packed)
    plan = make_plan(rollout, minibatches=2, max_tokens_per_microbatch=8, packed=packed)
    return add_logprobs(rollout, plan, policy, None, Corrections(), old=True), plan, policy


def teacher_forced(policy: PolicyModel, row: int) -> Tensor:
    """The log-probability of every token of a response, drawn or not, given all before it."""
    ids = torch.tensor([*PROMPTS[row], *RESPONSES[row]])
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(PROMPTS[row]) - 1 : -1] / 0.7
    return logits.log_softmax(-1).gather(1, torch.tensor(RESPONSES[row])[:, None])[:, 0]


@forms
def test_log_probabilities_are_of_drawn_tokens_given_all_tokens(packed: bool) -> None:
    rollout, _, policy = scored(with_holes(), packed=packed)
    found = rollout.require("old_logprobs")
    for row, actions in enumerate(ACTIONS):
        mask = torch.tensor(actions)
        expected = torch.where(mask, teacher_forced(policy, row).detach(), 0.0)
        assert_close(found[row, : len(actions)], expected, atol=1e-12, rtol=0)
        assert not found[row, len(actions) :].any()


def test_what_nobody_drew_is_read_by_what_comes_after_it_and_by_nothing_before() -> None:
    other = [row.copy() for row in RESPONSES]
    other[0][2] = 12
    first, second = (scored(with_holes(rows))[0].require("old_logprobs")[0] for rows in (RESPONSES, other))
    assert torch.equal(first[:1], second[:1]) and (first[3:] != second[3:]).all()


def test_advantages_and_returns_stand_at_drawn_tokens_alone() -> None:
    rollout, *_ = scored(with_holes())
    holes = rollout.action_mask.logical_not()
    assert torch.equal(rollout.valid_tokens, rollout.action_mask)
    signalled, rewards, stats = estimate_signal(rollout, GRPO(), Corrections())
    assert not signalled.require("advantages")[holes].any() and signalled.require("advantages")[~holes].all()
    last = [4, 1, 1, 2]  # the last token that was drawn, before a hole at the end
    assert rewards.shaped.nonzero().tolist() == [[row, last[row]] for row in range(4) if float(rollout.rewards[row])]
    assert float(stats["length/mean"].value()) == 9 / 4, "a response is as long as what was drawn"
    values = torch.where(holes, torch.nan, 0.25).double()
    ours, *_ = estimate_signal(rollout.replace(values=values), GAE(lam=0.9, whitened=False), Corrections())
    assert not ours.require("advantages")[holes].any() and not ours.require("returns")[holes].any()
    assert ours.require("advantages").isfinite().all()


@forms
def test_the_gradient_is_that_of_drawn_tokens_over_their_number(packed: bool) -> None:
    rollout, plan, policy = scored(with_holes(), packed=packed)
    rollout = estimate_signal(rollout, GRPO(), Corrections())[0]
    reference = a_policy()
    for step in range(2):
        policy.zero_grad()
        reference.zero_grad()
        accumulate_gradient(
            rollout,
            plan.step(step),
            lambda microbatch: policy(microbatch.layout),
            an_algorithm(loss=Reinforce(), reduction=token_mean),
            backward=lambda loss: loss.backward(),
        )
        rows = [row for row in range(4) if row // 2 == step]
        number = sum(sum(ACTIONS[row]) for row in rows)
        advantages = rollout.require("advantages")
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows:
            drawn = torch.tensor(ACTIONS[row])
            loss = loss - (teacher_forced(reference, row) * advantages[row, : len(drawn)])[drawn].sum() / number
        loss.backward()
        for found, expected in zip(policy.parameters(), reference.parameters(), strict=True):
            assert found.grad is not None and expected.grad is not None
            assert_close(found.grad, expected.grad, atol=1e-12, rtol=1e-9)
