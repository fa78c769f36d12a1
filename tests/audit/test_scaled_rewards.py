"""A bonus that grows with the reward says so, and then a constant that does not cancel is no finding."""

import pytest
import torch
from kit.support import an_algorithm, ragged_rollout

from lightning_rl import RLCallback
from lightning_rl.audit import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.subsample import some_rows
from lightning_rl.callbacks import LinearLengthPenalty, StopProperly


def evidence_with(callback: RLCallback, *, cut_off: bool = True) -> Evidence:
    """Four groups of four, some of whose rows were cut off."""
    rollout = ragged_rollout(16, group_size=4).sanitize()
    if not cut_off:
        rollout = rollout.replace(finish=torch.zeros_like(rollout.finish))
    algorithm = an_algorithm([callback], advantages="dr_grpo")
    return Evidence(algorithm=algorithm, facts=RunFacts(), rollout=rollout, groups=rollout, rows=some_rows(rollout, 0))


@pytest.mark.parametrize("make", [StopProperly, LinearLengthPenalty])
def test_a_bonus_that_scales_rewards_is_found_unless_it_says_so(make: type[RLCallback]) -> None:
    declared, silent = make(), make()
    silent.scales_rewards = False
    assert CHECKS["reward_shift"](evidence_with(declared)) == []
    (finding,) = CHECKS["reward_shift"](evidence_with(silent))
    assert finding.culprit == f"callback {silent.name}.reward_bonus"


@pytest.mark.parametrize("correction", [StopProperly(0.5), StopProperly(reward=-0.5)])
def test_a_number_for_truncated_rows_is_alive_where_none_was_cut_off(correction: StopProperly) -> None:
    assert CHECKS["knob_liveness"](evidence_with(correction, cut_off=False)) == []
