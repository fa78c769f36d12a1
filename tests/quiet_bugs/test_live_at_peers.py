"""Rows 2.01 to 2.22 of docs/evidence.md: silent bugs that other systems still had in August 2026."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from kit.run_checks import check
from kit.support import callback_of, ragged_rollout, rollout_of, run_step, view_of
from silent_bugs import merged, one_step, signal
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import (
    GAE,
    GRPO,
    RLOO,
    ClippedSurrogate,
    FakeEngine,
    FinishReason,
    Reinforce,
    RLCallback,
    Stat,
    sequence_mean,
    token_mean,
)
from lightning_rl.advantages import resolve_advantages
from lightning_rl.algorithm import policy_metrics
from lightning_rl.callbacks import (
    OPSM,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    SequenceRatioMask,
    TruncatedIS,
    no_eos_mask,
    opsm,
    truncated_is,
)
from lightning_rl.corrections import Corrections, LossView
from lightning_rl.losses import LOSSES, M2PO, ClipCov, PolicyLoss, resolve_loss
from lightning_rl.policy import make_plan
from lightning_rl.rollouts.estimate_signal import exclude_rows
from lightning_rl.run_checks import check_reads
from lightning_rl.signal.kl import KL_ESTIMATORS, k3, kl_estimator
from lightning_rl.signal.masked import whiten
from lightning_rl.signal.reductions import resolve_reduction
from lightning_rl.signal.shaped_rewards import shaped_rewards

NAN, INF = math.nan, math.inf
PLAIN = GAE(whitened=False)
WHOLE, CUTS = [range(12)], [[range(6), range(6, 12)], [[5], [0, 11, 3, 4, 2, 7, 8], [1, 10], [6, 9]], [range(12), []]]
OF_THE_ENGINE: list[Callable[[], RLCallback]] = [
    IcePop,
    OutlierMask,
    partial(SequenceRatioMask, "geometric"),
    partial(SequenceRatioMask, "product"),
    TruncatedIS,
    OffPolicyIS,
    RolloutKL,
    partial(OPSM, against="rollout"),
]


@pytest.mark.filterwarnings("ignore:ReferenceKL with")
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_2_01_a_base_that_is_nan_at_a_masked_token_spoils_no_gradient(estimator: str) -> None:
    view = view_of([-1.0, -1.0, -1.0], valid=[1, 1, 0], ref_logprobs=[-1.1, -1.1, NAN], advantages=[0.0] * 3)
    step = run_step(view, callbacks=[ReferenceKL(1.0, estimator=estimator, as_loss=True)])
    assert math.isfinite(float(step.loss)) and step.gradient.isfinite().all() and step.gradient[0, 2] == 0
    if estimator == "k2":
        assert float(step.loss) == pytest.approx(0.005, rel=1e-5)
        assert_close(step.gradient, torch.tensor([[0.05, 0.05, 0.0]]))


@pytest.mark.parametrize("padding", [0, 2])
def test_2_02_whitening_does_not_see_padding(padding: int) -> None:
    values = torch.tensor([[1.0, 1.0] + [-40.3] * padding, [3.0, 3.0] + [-40.3] * padding])
    mask = torch.tensor([[True, True] + [False] * padding] * 2)
    half = math.sqrt(3) / 2  # the deviation is the unbiased one
    expected = torch.tensor([[-half, -half] + [0.0] * padding, [half, half] + [0.0] * padding])
    assert_close(whiten(values, mask), expected)


@pytest.mark.parametrize("second", [1.0, 100.0, NAN])
def test_2_03_the_reward_of_a_masked_row_moves_no_other_row(second: float) -> None:
    finish = torch.tensor([FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    rollout = rollout_of([1.0, second], [[1, 1], [1, 1]], finish=finish)
    rollout = rollout.replace(rewarded=NoEOSMask().reward_mask(rollout))
    assert signal(rollout, GRPO())[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert signal(rollout, PLAIN)[0].tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_2_04_extremes_and_deviations_count_valid_tokens_alone() -> None:
    values, valid = torch.tensor([[0.1, 0.2, 9.0], [0.4, -9.0, NAN]]).exp(), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    ratio = Stat.of(values, valid)
    assert -Stat.of(-values, valid).maximum().value() == pytest.approx(1.105, abs=1e-3), "the minimum, which is not 0"
    assert ratio.maximum().value() == pytest.approx(math.exp(0.4))
    assert ratio.value() == pytest.approx(float(values[valid].mean()))
    assert ratio.std().value() == pytest.approx(float(values[valid].std()))


def test_2_05_kl_and_entropy_do_not_depend_on_microbatches_or_masked_rows() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    whole = one_step(rollout, WHOLE, RolloutKL(0.5), entropy_coef=0.1)
    assert {"entropy_bonus/loss", "rollout_kl/loss"} < whole.losses.keys()
    for cut in CUTS:
        found = one_step(rollout, cut, RolloutKL(0.5), entropy_coef=0.1)
        assert found.losses == pytest.approx(whole.losses) and found.metrics() == pytest.approx(whole.metrics())
    masked = rollout.replace(valid_tokens=torch.zeros_like(rollout.valid_tokens), action_mask=rollout.valid_tokens)
    both = masked.select(torch.arange(4)).state(), rollout.state()
    diluted = type(rollout).from_state({name: torch.cat([part[name] for part in both]) for name in both[0]})
    found = one_step(diluted, [range(16)], RolloutKL(0.5), entropy_coef=0.1)
    assert found.losses == pytest.approx(whole.losses) and found.metrics() == pytest.approx(whole.metrics())


def test_2_06_masked_tokens_are_no_time_steps() -> None:
    estimator, garbage = GAE(gamma=0.9, lam=0.5, whitened=False), 77.0
    dense = rollout_of([1.0], [[1, 1, 1]]).replace(values=torch.tensor([[0.3, -0.2, 0.7]]))
    holes = rollout_of([1.0], [[1, 0, 0, 1, 1, 0]])
    holes = holes.replace(values=torch.tensor([[0.3, garbage, garbage, -0.2, 0.7, garbage]]))
    expected, found = signal(dense, estimator)[0], signal(holes, estimator)[0]
    assert_close(found[holes.valid_tokens], expected[dense.valid_tokens])
    assert not found[~holes.valid_tokens].any()


@pytest.mark.parametrize("make", OF_THE_ENGINE)
def test_2_07_a_correction_without_its_log_probabilities_is_an_error(make: Callable[[], RLCallback]) -> None:
    correction = make()
    mute, speaking = (FakeEngine(lambda _: [2], returns_logprobs=flag) for flag in (False, True))
    with pytest.raises(ValueError, match='reads "rollout_logprobs", but FakeEngine gives none'):
        check(check_reads, correction, loss=Reinforce(), engine=mute, minibatches_per_rollout=2)
    check(check_reads, correction, loss=Reinforce(), engine=speaking, minibatches_per_rollout=2)
    with pytest.raises(ValueError, match='expected the rollout field "rollout_logprobs" to be set, got None'):
        run_step(view_of([-1.0]), callbacks=[correction])


@pytest.mark.parametrize("constant", [1.1, 2.7, 1e6])
def test_2_08_whitening_a_constant_gives_zero(constant: float) -> None:
    everywhere = torch.ones(10, 100, dtype=torch.bool)
    assert not whiten(torch.full((10, 100), constant), everywhere).any()


def test_2_08_whitening_survives_a_large_offset_and_nan_at_a_masked_token() -> None:
    values, mask = torch.tensor([[1000.0, 1000.01, NAN]]), torch.tensor([[True, True, False]])
    half = math.sqrt(0.5)  # the deviation is the unbiased one
    assert_close(whiten(values, mask), torch.tensor([[-half, half, 0.0]]))


@pytest.mark.parametrize("width", [3, 7])
def test_2_09_the_reward_of_a_short_row_stands_at_its_own_last_token(width: int) -> None:
    rollout = rollout_of([1.0, 2.0, 4.0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]).fit_width(width)
    found = shaped_rewards(rollout.rewards, None, rollout.valid_tokens)
    assert found[:, :3].tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 4]] and not found[:, 3:].any()


def test_2_10_the_divergence_from_the_engine_counts_valid_tokens_once() -> None:
    view = view_of([-1.0, -2.0, NAN], valid=[1, 1, 0], rollout_logprobs=[-1.5, -2.0, 9.0])
    own = policy_metrics(view)["kl/rollout"]
    expected = (math.exp(0.5) - 1.5) / 2
    assert own.value() == pytest.approx(expected)
    empty = policy_metrics(view.replace(valid_tokens=torch.zeros_like(view.valid_tokens)).sanitize())["kl/rollout"]
    nothing = policy_metrics(view.select(torch.arange(0)))["kl/rollout"]
    assert merged(own, empty, nothing, own) == pytest.approx(expected), "a rank without tokens adds nothing"


def test_2_11_seven_samples_are_a_group_of_four_and_one_of_three() -> None:
    rollout = rollout_of([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [[1]] * 7, groups=[5, 5, 5, 5, 3, 3, 3])
    high = math.sqrt(0.75)
    expected = torch.tensor([high, -high, high, -high, 0.0, 0.0, 0.0])[:, None]
    assert_close(signal(rollout, GRPO())[0], expected, atol=1e-5, rtol=0)


def test_2_12_a_drifted_bad_response_is_rejected_as_a_whole() -> None:
    view = view_of([0.0] * 3, old_logprobs=[1.0] * 3, advantages=[-0.5, 0.25, -0.25])
    step = run_step(view, callbacks=[OPSM(0.1)], loss=ClippedSurrogate())
    assert float(step.loss) == 0 and not step.gradient.any(), "token by token, -0.0306566 would remain"
    assert step.metrics["opsm/rejected"] == 1.0, "a fraction of rows"
    spoiled = view_of([0.0] * 3, old_logprobs=[1.0, 1.0, NAN], advantages=[-0.5, -0.25, NAN], valid=[1, 1, 0])
    assert not OPSM(0.1).sequence_mask(spoiled).item(), "NaN at a masked token keeps nothing"


@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
@pytest.mark.parametrize("removed", [0.0, 50.0])
def test_2_12_a_removed_row_is_in_no_statistic(estimator: Any, removed: float) -> None:
    remove = callback_of("remove", exclude=lambda seen: seen.sample_ids == 102)
    rollout, _ = exclude_rows(rollout_of([1.0, 0.0, removed], [[1], [1], [1]]), Corrections([remove]))
    advantages, logged = signal(rollout, estimator)
    assert advantages[0] == -advantages[1] != 0 and advantages[2] == 0 and logged["reward/task"] == 0.5


def test_2_13_shaping_is_masked_and_an_empty_response_is_no_error() -> None:
    penalty = callback_of("penalty", token_reward=lambda seen: torch.full(seen.response_ids.shape, -0.25))
    advantages, logged = signal(rollout_of([1.0, 8.0], [[1, 0, 1, 0], [0, 0, 0, 0]]), PLAIN, penalty)
    assert advantages.tolist() == [[0.5, 0.0, 0.75, 0.0], [0.0] * 4]
    assert logged["reward/shaped"] == 0.25, "the mean of 0.5 and of nothing at all"


def test_2_14_a_response_is_truncated_if_its_engine_says_so_and_not_if_it_fills_the_width() -> None:
    finish = torch.tensor([FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    rollout = rollout_of([1.0, 1.0], [[1, 1, 1], [1, 1, 1]], finish=finish)
    for width in (3, 5):
        assert NoEOSMask().reward_mask(rollout.fit_width(width)).tolist() == [True, False]
        assert NoEOSMask("drop_tokens").exclude(rollout.fit_width(width)).tolist() == [False, True]


def test_2_15_no_reward_is_lost_at_a_masked_last_token() -> None:
    penalty = callback_of("penalty", token_reward=lambda seen: torch.full(seen.response_ids.shape, -0.25))
    rollout = rollout_of([1.0, 2.0], [[1, 1, 0], [0, 1, 0]], response_lengths=[3, 3])
    advantages, _ = signal(rollout, PLAIN, penalty)
    assert advantages.tolist() == [[0.5, 0.75, 0.0], [0.0, 1.75, 0.0]], "the first return is all of the reward"


@pytest.mark.parametrize(
    ("loss", "callbacks"), [pytest.param(M2PO(), [], id="M2PO"), pytest.param(Reinforce(), [IcePop()], id="IcePop")]
)
@pytest.mark.parametrize("reduction", [token_mean, sequence_mean])
def test_2_16_six_of_eight_tokens_weigh_an_eighth_each(
    reduction: Any, loss: PolicyLoss, callbacks: list[RLCallback]
) -> None:
    ratio = torch.tensor([1.0, 9.0, 1.0, 1.0, 0.01, 1.0, 1.0, 1.0])
    view = view_of([-1.0] * 8, old_logprobs=[-1.0] * 8, rollout_logprobs=-1.0 - ratio.log())
    gradient = run_step(view, callbacks=callbacks, loss=loss, reduction=reduction).gradient
    assert_close(gradient, torch.where(ratio == 1, -1 / 8, 0.0)[None])


def test_2_17_the_overlong_penalty_can_be_asked_twice() -> None:
    rollout = rollout_of([0.0, 0.0, 0.0], [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    bonuses = [OverlongPenalty(4, 2).reward_bonus(rollout) for _ in range(2)]
    assert bonuses[0].tolist() == bonuses[1].tolist() == [-1.0, -0.5, 0.0]
    assert not rollout.rewards.any(), "the task reward stays raw"
    assert torch.equal(*(signal(rollout, PLAIN, OverlongPenalty(4, 2))[0] for _ in range(2)))


@pytest.mark.parametrize(
    "resolve",
    [kl_estimator, resolve_loss, resolve_advantages, lambda name: resolve_reduction(name, 8)],
    ids=["kl", "loss", "advantages", "reduction"],
)
def test_2_18_every_name_that_an_error_offers_is_accepted(resolve: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="out of") as refused:
        resolve("unheard of")
    offered = re.search(r"out of ([\w, ]+?)(?: or |, an object|, got)", str(refused.value))
    assert offered is not None
    names = offered[1].split(", ")
    assert len(names) >= 2 and all(callable(resolve(name)) for name in names)


@pytest.mark.parametrize(
    ("make", "known"),
    [
        pytest.param(NoEOSMask, get_args(no_eos_mask.Action), id="NoEOSMask"),
        pytest.param(TruncatedIS, tuple(truncated_is.CAPS), id="TruncatedIS"),
        pytest.param(lambda name: OPSM(against=name), get_args(opsm.Anchor), id="OPSM"),
    ],
)
def test_2_18_every_documented_option_is_accepted(make: Callable[[Any], RLCallback], known: tuple[str, ...]) -> None:
    assert len(known) >= 2 and all(make(name) for name in known)


def test_2_19_a_row_without_others_has_no_advantage_and_nan_stays_where_it_is() -> None:
    rollout = rollout_of([5.0, NAN, 1.0, 3.0], [[1]] * 4, groups=[0, 0, 1, 1])
    rollout = rollout.replace(rewarded=torch.tensor([True, False, True, True]))
    assert signal(rollout, RLOO())[0].flatten().tolist() == [0.0, 0.0, -2.0, 2.0]
    assert signal(rollout, GRPO())[0].flatten()[:2].tolist() == [0.0, 0.0]


def test_2_19_a_rank_without_a_valid_token_joins_every_collective() -> None:
    def collectives(mask: Tensor) -> int:
        calls: list[Tensor] = []

        def counted(values: Tensor) -> Tensor:
            calls.append(values)
            return values

        whiten(torch.ones(mask.shape), mask, counted)
        return len(calls)

    full = torch.ones(2, 3, dtype=torch.bool)
    assert 0 < collectives(full) == collectives(~full) == collectives(full[:0])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs"])
def test_2_20_poison_at_a_masked_token_reaches_neither_loss_nor_gradient(field: str, poison: float) -> None:
    given: dict[str, list[float]] = {
        "old_logprobs": [-1.2, -0.9, -1.0],
        "rollout_logprobs": [-1.1, -0.8, -1.0],
        "ref_logprobs": [-1.3, -1.0, -1.0],
        "advantages": [1.0, -1.0, 1.0],
    }

    def step(loss: PolicyLoss, third: float) -> tuple[float, Tensor]:
        fields: dict[str, Any] = {"logprobs": [-1.0, -1.0, -1.0], **given}
        fields[field] = [*fields[field][:2], third]
        view: LossView = view_of(fields.pop("logprobs"), valid=[1, 1, 0], **fields)
        callbacks = [OPSM(0.5), IcePop(), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]
        found = run_step(view, callbacks=callbacks, loss=loss)
        return float(found.loss), found.gradient

    for loss in LOSSES.values():
        (clean, gradient), (spoiled, spoiled_gradient) = step(loss, -1.0), step(loss, poison)
        assert spoiled == clean and torch.equal(spoiled_gradient, gradient)


def test_2_21_the_force_back_never_fades_with_drift() -> None:
    drift = torch.linspace(0.0, 40.0, 81, requires_grad=True)
    (force,) = torch.autograd.grad(k3(-drift, torch.zeros(81)).sum(), drift)
    assert (force.diff() >= 0).all() and force.isfinite().all()
    assert force[6] > 15, "at a gap of 3, where a value clamped at 10 pulls no more"


def test_2_22_a_step_draws_no_global_random_number() -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    loss, found = ClipCov(fraction=0.25, cov_low=-9.0, cov_high=9.0), []
    with torch.random.fork_rng():
        for seed, cut in enumerate((WHOLE, *CUTS)):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            advantages, _ = signal(rollout, GRPO())
            plan = make_plan(rollout, minibatches=2, max_tokens_per_microbatch=20).rows()
            found.append((advantages, plan, one_step(rollout, cut, RolloutKL(0.1), loss=loss)))
            assert torch.equal(torch.get_rng_state(), before)
    (advantages, plan, step), *others = found
    assert 0.1 < step.metrics()["policy/chosen"] < 0.3
    for other_advantages, other_plan, other in others:
        assert torch.equal(other_advantages, advantages) and other_plan == plan
        assert other.metrics() == pytest.approx(step.metrics())
        assert_close(other.gradient, step.gradient)
