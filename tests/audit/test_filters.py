"""Group filters that refill: valid ones give no finding; those that depend on padding, place or other prompts are
found.
"""

import warnings
from typing import Any

import pytest
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from typing_extensions import override

from lightning_rl import FinishReason, RLCallback, Rollout, SamplingParams
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.callbacks import DynamicSampling
from lightning_rl.generation import Completion, Request
from lightning_rl.rewards import RewardCall


class ByMean(RLCallback):
    """A valid filter of prompts whose mean reward is not too high."""

    name, max_rounds = "by_mean", 4

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        same = rollout.groups[:, None] == rollout.groups
        return (same * rollout.rewards).sum(-1) < 0.6 * same.sum(-1)


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
