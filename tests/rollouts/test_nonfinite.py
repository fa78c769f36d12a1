"""Rows to blame for a non-finite gradient."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kit.support import ragged_rollout
from torch.nn.functional import pad

from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollouts.nonfinite import record_nonfinite
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.update import StepGradient


@pytest.mark.parametrize(
    ("name", "number", "valid", "suspects"),
    [
        ("token_extras", torch.nan, True, [3]),
        ("token_extras", torch.nan, False, range(12)),
        ("prompt_extras", torch.nan, False, [3]),  # as wide as the responses here, but valid_tokens is not its mask
        ("extras", torch.inf, False, [3]),
        ("rewards_by_function", torch.inf, False, [3]),
        ("rewards_by_function", torch.nan, False, range(12)),
    ],
)
def test_a_row_with_a_number_that_is_not_finite_is_a_suspect(
    name: str, number: float, valid: bool, suspects: Sequence[int], tmp_path: Path
) -> None:
    rollout = ragged_rollout()
    rollout = rollout.replace(prompt_ids=pad(rollout.prompt_ids, (0, rollout.width - rollout.prompt_ids.shape[1])))
    broken = torch.zeros(rollout.response_ids.shape)
    broken[3, int((rollout.valid_tokens[3] == valid).nonzero()[0, 0])] = number
    rollout = rollout.replace(**{name: {"broken": broken.sum(1) if name == "rewards_by_function" else broken}})
    current = CurrentRollout.of(0, rollout, plan_of_rows(rollout, [[[*range(12)]]]))
    record_nonfinite(tmp_path, current, 0, StepGradient(), 0)
    recorded = torch.load(tmp_path / "rollout-0-rank-0.pt", weights_only=True)
    assert recorded["suspects"] == list(suspects)
