"""Group filters that refill: valid ones give no finding; those that depend on padding, place or other prompts are
found.
"""

import warnings
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from typing_extensions import override

from lightning_rl import FinishReason, RLCallback, Rollout, SamplingParams
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.callbacks import DynamicSampling
from lightning_rl.generation import Completion, Request
from lightning_rl.rewards import RewardCall


def whole_groups(rollout: Rollout, rows: Tensor) -> Tensor:
    """Return the rows of groups that are completely selected, [B]."""
    return ~torch.isin(rollout.groups, rollout.groups[~rows])


class ByMean(RLCallback):
    """A valid filter of prompts whose mean reward is not too high."""

    name, max_rounds = "by_mean", 4

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        same = rollout.groups[:, None] == rollout.groups
        return (same * rollout.rewards).sum(-1) < 0.6 * same.sum(-1)


class ByWidth(RLCallback):
    """A filter of prompts whose answers fill the padded width."""

    name, max_rounds = "by_width", 4

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        same = rollout.groups[:, None] == rollout.groups
        return (same * rollout.response_lengths).sum(-1) > 0.5 * rollout.width * same.sum(-1)


class ByPairs(RLCallback):
    """A filter of prompts with different rewards that assumes groups of two neighbors."""

    name, max_rounds = "by_pairs", 4

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        differ = rollout.rewards.view(-1, 2).std(-1) > 0
        return whole_groups(rollout, differ.repeat_interleave(2))


class ByOthers(RLCallback):
    """A filter of prompts at least as good as the average, without declaring the comparison."""

    name, max_rounds = "by_others", 4

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        same = rollout.groups[:, None] == rollout.groups
        return (same * rollout.rewards).sum(-1) >= rollout.rewards.mean() * same.sum(-1)


def alarms(callback: RLCallback, rollouts: int = 2, **options: Any) -> set[str]:
    audit = SignalAudit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = tiny_module(**{"patience": None, **options})
        fit(module, callbacks=[callback, audit], data=tiny_prompts(4 * rollouts, 4))
    return {finding.culprit for finding in audit.findings}


@pytest.mark.nightly
@pytest.mark.parametrize("callback", [ByMean(), DynamicSampling(max_rounds=4)], ids=lambda callback: callback.name)
@pytest.mark.parametrize("options", [{"group_size": 2, "temperature": 0.05}, {"max_staleness": 1}], ids=["sure", "old"])
def test_a_legal_filter_that_refills_gives_no_alarm(callback: RLCallback, options: dict[str, Any]) -> None:
    assert alarms(callback, **options) == set()


@pytest.mark.parametrize("callback", [ByWidth(), ByPairs(), ByOthers()], ids=lambda callback: callback.name)
def test_a_filter_that_minds_more_than_its_own_prompt_is_named(callback: RLCallback) -> None:
    assert alarms(callback, rollouts=1) == {f"callback {callback.name}.keep_groups"}


def test_equal_answers_of_two_rounds_belong_to_the_round_of_their_call() -> None:
    """Two rounds of two samples and a greedy answer each, with equal tokens."""

    def batch(first: int) -> list[tuple[Request, Completion]]:
        sampling = SamplingParams(eos_token_ids=())
        return [
            (
                Request(prefix_ids=(first,), sample_id=first + place, seed=place, sampling=sampling),
                Completion(token_ids=(5,), logprobs=None, finish=FinishReason.STOP, version=0),
            )
            for place in range(3)
        ]

    def call(rows: int, token: int = 5) -> RewardCall:
        return RewardCall("judge", [[token]] * rows, [0.0] * rows, 0.0, ["a"] * rows, [""] * rows, {}, None)

    batches = [batch(10), batch(20)]
    assert samples_of_calls(batches, [call(2), call(1), call(2), call(1)]) == [[10, 11], [12], [20, 21], [22]]
    assert samples_of_calls(batches, [call(2, 6), call(3), call(3)]) == [[], [10, 11, 12], [20, 21, 22]]
