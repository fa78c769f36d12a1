"""RoleBaseline: each role has the mean of its rewards in earlier rollouts as baseline, and resumes exactly."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, recorder, tiny_module
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import PromptDataModule, Rollout
from lightning_rl.callbacks import RoleBaseline

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning", "ignore:.*when using `ckpt_path`, callbacks used.*:UserWarning"
)
ROWS = [{"prompt": [2 + n % 9, 3], "role": "first" if n % 2 else "second"} for n in range(16)]


def score(prompts: Any, completion_ids: Sequence[Sequence[int]], role: Sequence[str], **_: Any) -> list[float]:
    """Return a number of the tokens, with an advantage for the player who moves first."""
    return [sum(ids) % 3 + 4.0 * (one == "first") for ids, one in zip(completion_ids, role, strict=True)]


def run(*callbacks: Any, **options: Any) -> list[Rollout]:
    kept = list[Rollout]()
    module = tiny_module(rewards=score, advantages="reinforce", group_size=2)
    data = PromptDataModule(ROWS, 4, shuffle=False)
    fit(module, callbacks=[*callbacks, recorder(kept)("kept")], data=data, max_steps=6, **options)
    return kept


def expected(rollouts: Sequence[Rollout], decay: float) -> list[dict[str, float]]:
    """The baselines before each rollout, from the formula."""
    found = [dict.fromkeys(("first", "second"), 0.0)]
    for rollout in rollouts:
        roles = [ROWS[group % 16]["role"] for group in rollout.groups.tolist()]
        rewards = rollout.rewards.tolist()
        mine = {role: [r for r, one in zip(rewards, roles, strict=True) if one == role] for role in found[-1]}
        found.append(
            {role: decay * b + (1 - decay) * sum(mine[role]) / len(mine[role]) for role, b in found[-1].items()}
        )
    return found


def test_a_baseline_is_the_decayed_mean_of_the_rewards_of_its_role_in_earlier_rollouts() -> None:
    baseline = RoleBaseline(decay=0.5)
    rollouts = run(baseline)
    baselines = expected(rollouts, 0.5)
    assert baseline.baselines == pytest.approx(baselines[-1], abs=1e-12) and baselines[-1]["first"] > 3
    for rollout, before in zip(rollouts, baselines, strict=False):
        for row in range(len(rollout)):
            advantage = rollout.require("advantages")[row][rollout.valid_tokens[row]]
            right = float(rollout.rewards[row]) - before[ROWS[int(rollout.groups[row]) % 16]["role"]]
            assert advantage.tolist() == pytest.approx([right] * len(advantage), abs=1e-6)


def test_a_resumed_run_goes_on_with_the_baselines(tmp_path: Path) -> None:
    whole, resumed = RoleBaseline(), RoleBaseline()
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    expected_rollouts = run(whole, every, enable_checkpointing=True)
    checkpoint = tmp_path / "step=3.ckpt"
    rollouts = run(resumed, ModelCheckpoint(), enable_checkpointing=True, ckpt_path=checkpoint)
    assert resumed.baselines == whole.baselines and 0 < len(rollouts) < len(expected_rollouts)
    assert torch.equal(rollouts[-1].require("advantages"), expected_rollouts[-1].require("advantages"))


def test_data_without_roles_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match='expected a column "player" of the data for RoleBaseline'):
        run(RoleBaseline("player"))
