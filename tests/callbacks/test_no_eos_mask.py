"""NoEOSMask: a response that was truncated gets no reward and enters no reward statistic."""

from typing import Any

import pytest
import torch
from kit.support import ragged_rollout, rollout_of, run_step, view_of_rollout
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GAE, GRPO, RLOO, FinishReason, Reinforce, Rollout, token_mean
from lightning_rl.advantages import resolve_advantages
from lightning_rl.callbacks import NoEOSMask, ReferenceKL
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def finished(rollout: Rollout, callback: NoEOSMask, estimator: Any, *others: RLCallback) -> Rollout:
    """The rollout as the stages hand it to the update."""
    corrections = Corrections([callback, *others])
    rollout = rollout.replace(rewarded=rollout.rewarded & corrections.reward_mask(rollout))
    return estimate_signal(exclude_rows(rollout, corrections)[0], resolve_advantages(estimator), corrections)[0]


def two_rows(second: float) -> Rollout:
    finish = torch.tensor([STOP, LENGTH], dtype=torch.uint8)
    return rollout_of([1.0, second], [[1, 0], [1, 1]], finish=finish)


@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
@pytest.mark.parametrize("second", [1.0, 100.0])
def test_witness_the_reward_of_a_row_without_eos_does_not_reach_the_other(estimator: Any, second: float) -> None:
    found = finished(two_rows(second), NoEOSMask(), estimator)
    assert found.require("advantages").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert found.valid_tokens.tolist() == [[True, False], [True, True]]


def test_without_the_mask_it_would() -> None:
    found = estimate_signal(two_rows(100.0), RLOO(), Corrections())[0]
    assert found.require("advantages").tolist() == [[-99.0, 0.0], [99.0, 99.0]]


def gradient(rollout: Rollout) -> Tensor:
    view = view_of_rollout(rollout, torch.full(rollout.response_ids.shape, -1.0).requires_grad_())
    return run_step(view, loss=Reinforce(), reduction=token_mean).gradient


def test_its_tokens_stay_in_the_denominator_or_leave_it() -> None:
    finish = torch.tensor([STOP, STOP, LENGTH], dtype=torch.uint8)
    rollout = rollout_of([1.0, 0.0, 5.0], [[1, 0], [1, 0], [1, 1]], finish=finish)
    kept = gradient(finished(rollout, NoEOSMask(), RLOO()))
    dropped = gradient(finished(rollout, NoEOSMask("drop_tokens"), RLOO()))
    assert kept.tolist() == [[-0.25, 0.0], [0.25, 0.0], [0.0, 0.0]]
    assert dropped.tolist() == [[-0.5, 0.0], [0.5, 0.0], [0.0, 0.0]]


def test_with_a_critic_its_penalty_and_value_parts_remain() -> None:
    rollout = two_rows(100.0).replace(old_logprobs=torch.full((2, 2), -1.0), ref_logprobs=torch.full((2, 2), -2.0))
    rollout = rollout.replace(values=torch.full((2, 2), 0.5))
    found = finished(rollout, NoEOSMask(), GAE(whitened=False), ReferenceKL(0.1))
    assert_close(found.require("advantages"), torch.tensor([[0.4, 0.0], [-0.7, -0.6]]))


@pytest.mark.parametrize(
    ("finish", "rewarded"), [(STOP, True), (ABORT, True), (LENGTH, False)], ids=["stop", "abort", "length"]
)
def test_only_the_finish_reason_decides(finish: FinishReason, rewarded: bool) -> None:
    rollout = rollout_of([1.0], [[1, 1]], finish=torch.tensor([finish], dtype=torch.uint8))
    for width in (2, 5):  # a padded column more changes nothing
        wide = rollout.fit_width(width)
        assert NoEOSMask().reward_mask(wide).tolist() == [rewarded]
        assert NoEOSMask("drop_tokens").exclude(wide).tolist() == [not rewarded]
        assert NoEOSMask().exclude(wide).tolist() == [False]


@pytest.mark.parametrize("action", ["zero_reward", "drop_tokens"])
def test_logs_the_share_of_real_rows_that_were_truncated_even_if_they_are_dropped(action: Any) -> None:
    rollout = ragged_rollout(24)
    padded = rollout.replace(sample_ids=torch.where(torch.arange(24) < 20, rollout.sample_ids, -1))
    cut_of_real = float((rollout.finish[:20] == LENGTH).float().mean())
    assert 0 < cut_of_real < 1 and (rollout.finish[20:] == LENGTH).any()
    (stat,) = NoEOSMask(action).rollout_metrics(exclude_rows(padded, Corrections([NoEOSMask(action)]))[0]).values()
    assert float(stat.value()) == pytest.approx(cut_of_real)
