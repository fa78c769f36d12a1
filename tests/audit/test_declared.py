"""Declarations of corrections that prevent findings, such as scaled rewards and selected rows."""

from dataclasses import replace

import pytest
import torch
from kit.support import an_algorithm, ragged_rollout

from lightning_rl import RLCallback
from lightning_rl.audit import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.callbacks import LinearLengthPenalty, PositiveNLL, StopProperly
from lightning_rl.corrections import Corrections
from lightning_rl.testing.properties.subsample import some_rows


def evidence_with(callback: RLCallback, *, truncated: bool = True) -> Evidence:
    """Return evidence of four groups of four with some truncated rows."""
    rollout = ragged_rollout(16, group_size=4).sanitize()
    if not truncated:
        rollout = rollout.replace(finish=torch.zeros_like(rollout.finish))
    algorithm = an_algorithm([callback], advantages="dr_grpo")
    return Evidence(algorithm=algorithm, facts=RunFacts(), rollout=rollout, groups=rollout, rows=some_rows(rollout, 0))


@pytest.mark.parametrize("make", [StopProperly, LinearLengthPenalty])
def test_a_bonus_that_scales_rewards_is_found_unless_it_says_so(make: type[RLCallback]) -> None:
    declared, silent = make(), make()
    silent.scales_rewards = False
    assert CHECKS["reward_shift"](evidence_with(declared)) == []
    (finding,) = CHECKS["reward_shift"](evidence_with(silent))
    (method,) = silent.contributes & {"replace_reward", "reward_bonus"}
    assert finding.culprit == f"callback {silent.name}.{method}"


@pytest.mark.parametrize("correction", [StopProperly(0.5), StopProperly(reward=-0.5)])
def test_a_number_for_truncated_rows_is_alive_where_none_was_truncated(correction: StopProperly) -> None:
    assert CHECKS["knob_liveness"](evidence_with(correction, truncated=False)) == []


def test_a_term_may_leave_out_every_row_if_it_says_so() -> None:
    declared, silent = PositiveNLL(threshold=9.0), PositiveNLL(threshold=9.0)
    silent.chooses_rows = False
    assert CHECKS["gradient_liveness"](evidence_with_fields(declared)) == []
    (finding,) = CHECKS["gradient_liveness"](evidence_with_fields(silent))
    assert finding.culprit == "callback positive_nll.loss_term"


def evidence_with_fields(correction: PositiveNLL) -> Evidence:
    """Return evidence whose rows have the fields that the correction provides."""
    evidence = evidence_with(correction)
    rollout = Corrections([correction]).provide(evidence.rollout)
    return replace(evidence, rollout=rollout, groups=rollout, rows=some_rows(rollout, 0))
