"""Failures on one rank of two: both end alike, with a checkpoint, and both log the same metrics."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.rows import Rows
from kit.support import fit, parity_reward, tiny_module, tiny_prompts

from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.rewards import RewardError


def rank(folder: Path, strategy: str) -> None:
    """One of two ranks: the second alone notes metrics, and fails in the third rollout."""
    calls: list[int] = []

    def breaks(prompts: Any, completions: Any, log_metric: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        calls.append(len(prompts))
        if torch.distributed.get_rank() == 1:
            log_metric("calls", len(calls))
            if len(calls) == 3:
                raise KeyError("no answer")
        return parity_reward(prompts, completions, completion_ids=completion_ids)

    warnings.simplefilter("ignore")
    figures, module = Rows(), tiny_module(rewards={"breaks": breaks}, max_reward_failure_rate=0.5)
    with pytest.raises(RewardError, match=r"(?s)rollout 2.* failed on 8 of 16 rows .*raised KeyError\('no answer'\)"):
        fit(
            module, data=tiny_prompts(16, 4), callbacks=[figures], default_root_dir=folder, devices=2,
            strategy=STRATEGIES[strategy](),
        )  # fmt: skip
    assert [row["reward_metric/breaks/calls"] for row in figures.rows] == [1.0, 2.0]
    assert (folder / INTERRUPTED).exists()


def test_both_ranks_end_alike_if_one_fails(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, "ddp")
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 2
    assert [path.name for path in (tmp_path / "failed_rewards").iterdir()] == ["rollout-2-rank-1.jsonl"]


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2])
