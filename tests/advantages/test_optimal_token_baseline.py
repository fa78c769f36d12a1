"""OptimalTokenBaseline: the baseline with the least variance, step by step."""

from dataclasses import replace

import pytest
import torch
from kit.support import callback_of, fit, tiny_module, tiny_policy
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import Rollout
from lightning_rl.advantages import OptimalTokenBaseline, RewardSignal
from lightning_rl.advantages.optimal_token_baseline import logit_gradients
from lightning_rl.signal.shaped_rewards import shaped_rewards

HALF, NINE = torch.tensor(0.5).double().log().item(), torch.tensor(0.9).double().log().item()


def signal(
    scores: list[float], valid: list[list[int]], logprobs: list[list[float]], squares: list[list[float]]
) -> RewardSignal:
    """Answers to one prompt."""
    given, mask = torch.tensor(scores, dtype=torch.float64), torch.tensor(valid).bool()
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return RewardSignal(
        scores=given,
        rewarded=torch.ones(len(given), dtype=torch.bool),
        groups=torch.zeros(len(given), dtype=torch.int64),
        valid_tokens=mask,
        token_rewards=nothing,
        shaped=shaped_rewards(given, None, mask),
        old_logprobs=torch.tensor(logprobs, dtype=torch.float64),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float64),
        sum_pi_squared=torch.tensor(squares, dtype=torch.float64),
    )


# sizes: 1 - 2 * 0.5 + 0.5 = 0.5 of a token with probability 0.5, 1 - 1.8 + 0.9 = 0.1 of one with 0.9
PAIR = signal([1, 0], [[1, 1], [1, 1]], [[HALF, HALF], [NINE, HALF]], [[0.5, 0.5], [0.9, 0.5]])


def advantages(given: RewardSignal, **options: object) -> Tensor:
    return OptimalTokenBaseline(**options)(given).advantages  # pyrefly: ignore[bad-argument-type]


def test_the_size_of_a_gradient_is_that_of_the_logits() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64).requires_grad_()
    logprobs = logits.log_softmax(0)
    (slope,) = torch.autograd.grad(logprobs[1], logits, retain_graph=True)
    squares = logprobs.exp().square().sum()
    assert_close(logit_gradients(logprobs[1].detach(), squares.detach()), slope.square().sum())


def test_a_row_weighs_as_much_as_its_gradients_so_far() -> None:
    first, second = 0.5 / 0.6, 1.0 / 1.6  # W: 0.5 beside 0.1, then 1.0 beside 0.6
    expected = [[1 - first, 1 - second], [-first, -second]]
    assert_close(advantages(PAIR), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("certainty", [12.0, 16.0, 40.0])
def test_almost_certain_tokens_shift_with_the_rewards(certainty: float, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 0, 0] = certainty
    logprobs = logits.to(dtype).log_softmax(-1)
    given = signal([1, 0, 1, 0], [[1] * 3] * 4, [[0.0] * 3] * 4, [[0.0] * 3] * 4)
    given = replace(given, old_logprobs=logprobs[..., 0], sum_pi_squared=logprobs.exp().square().sum(-1))
    found = advantages(given, bare_tail=False)
    assert_close(advantages(replace(given, shaped=given.shaped + torch.tensor([0, 0, 100.0])), bare_tail=False), found)
    assert (found[::2] >= 0).all() and (found[1::2] <= 0).all()  # the baseline lies within the rewards


def test_rounding_leaves_the_size_of_an_almost_certain_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 50, generator=generator)
    logits[:, 0] = 8 + 8 * torch.rand(500, generator=generator)
    exact, rounded = (kind.log_softmax(-1) for kind in (logits.double(), logits))
    true, found = (logit_gradients(one[:, 0], one.exp().square().sum(-1)) for one in (exact, rounded))
    assert ((found / true > 0.4) & (found / true < 2.1)).all()


def test_holes_are_no_steps() -> None:
    holes = signal([1, 0], [[1, 0, 1], [0, 1, 1]], [[HALF, 0, HALF], [0, NINE, HALF]], [[0.5, 7, 0.5], [7, 0.9, 0.5]])
    found = advantages(holes)
    assert torch.equal(found[0, [0, 2]], advantages(PAIR)[0]) and torch.equal(found[1, [1, 2]], advantages(PAIR)[1])
    assert found[0, 1] == 0 and found[1, 0] == 0


LONGER = signal([1, 0], [[1, 1], [1, 0]], [[HALF, HALF], [HALF, HALF]], [[0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize(("bare", "last"), [(True, 1.0), (False, 0.0)])
def test_the_end_of_the_longest_row_has_no_baseline_or_teaches_nothing(bare: bool, last: float) -> None:
    assert advantages(LONGER, bare_tail=bare).tolist() == [[0.5, last], [-0.5, 0.0]]


def test_a_group_of_one_and_equal_rewards_teach_nothing() -> None:
    alone = replace(LONGER, groups=torch.tensor([0, 1]))
    assert not advantages(alone).any()
    equal = signal([2, 2], [[1, 1], [1, 0]], [[HALF, HALF]] * 2, [[0.5, 0.5]] * 2)
    assert not advantages(equal).any()


def test_a_row_without_reward_enters_no_baseline_and_keeps_what_its_tokens_are_given() -> None:
    three = signal(
        [1, 0, 0], [[1, 1, 0], [1, 1, 0], [1, 1, 1]], [[HALF, HALF, 0], [NINE, HALF, 0], [HALF] * 3], [[0.5] * 3] * 3
    )
    squares = torch.tensor([[0.5, 0.5, 0], [0.9, 0.5, 0], [0.5] * 3], dtype=torch.float64)
    given = torch.tensor([[0, 0, 0], [0, 0, 0], [-0.25, 0, -0.5]], dtype=torch.float64)
    rewarded = torch.tensor([True, True, False])
    found = advantages(
        replace(three, sum_pi_squared=squares, token_rewards=given, shaped=three.shaped + given, rewarded=rewarded)
    )
    assert_close(found[:2, :2], advantages(PAIR))
    assert found[2].tolist() == [-0.75, -0.5, -0.5]


FURTHER = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()


def test_the_ratio_to_the_engine_counts_squared_and_truncated() -> None:
    shifted = replace(PAIR, rollout_logprobs=PAIR.require("old_logprobs", "the test") - FURTHER)
    first, second = 4 * 0.5 / (4 * 0.5 + 0.1), 4 * 1.0 / (4 * 1.0 + 0.6)  # exp(1) is cut to 2
    expected = [[1 - first, 1 - second], [-first, -second]]
    assert_close(advantages(shifted, importance_cap=2.0), torch.tensor(expected, dtype=torch.float64))


def test_what_it_reads_and_declares_follows_its_options() -> None:
    assert OptimalTokenBaseline().reads == ("old_logprobs", "token_extras/sum_pi_squared")
    assert OptimalTokenBaseline(importance_cap=2.0).reads[-1] == "rollout_logprobs"
    assert OptimalTokenBaseline(bare_tail=False).shift_invariant and not OptimalTokenBaseline().shift_invariant


def test_without_its_fields_it_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="expected sum_pi_squared for OptimalTokenBaseline, got none"):
        OptimalTokenBaseline()(replace(PAIR, sum_pi_squared=None))


def test_a_run_gives_it_the_sums_of_the_policy_before_the_update() -> None:
    seen: list[Rollout] = []
    look = callback_of("look", observe=lambda rollout: seen.append(rollout))
    module = tiny_module(advantages="optimal_token_baseline")
    with torch.random.fork_rng():
        untrained = tiny_policy()
    fit(module, callbacks=[look], max_steps=1)
    rollout = seen[0]
    sums, valid = rollout.token_extras["sum_pi_squared"], rollout.valid_tokens
    assert rollout.old_logprobs is not None
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, : rollout.prompt_lengths[row]]
        ids = torch.cat([prompt, rollout.response_ids[row, : rollout.response_lengths[row]]])
        probabilities = untrained(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].softmax(-1)
        assert_close(sums[row, : len(probabilities)], probabilities.square().sum(-1).detach(), rtol=1e-4, atol=1e-5)
    assert valid.any() and not sums[~valid].any()


def test_nobody_else_pays_for_the_sums() -> None:
    seen: list[Rollout] = []
    fit(tiny_module(), callbacks=[callback_of("look", observe=lambda rollout: seen.append(rollout))], max_steps=1)
    assert "sum_pi_squared" not in seen[0].token_extras
