"""Two ranks of which only one has groups to replace."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import TIMEOUT, run_ranks
from kit.support import fit, tiny_module
from lightning.pytorch.strategies import DDPStrategy

from lightning_rl import PromptDataModule
from lightning_rl.callbacks import DynamicSampling

CALLS = list[Sequence[str]]()


def right(prompts: Any, completions: Any, answer: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
    """Give every response to an easy prompt 1, and the others different rewards."""
    CALLS.append(answer)
    scores = zip(answer, completion_ids, strict=True)
    return [1.0 if one == "easy" else float(row % 4) + len(ids) for row, (one, ids) in enumerate(scores)]


@pytest.mark.nightly
def test_training_goes_on_if_one_rank_alone_replaces_a_group(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)
    calls = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    assert min(len(one) for one in calls) == 2 < max(len(one) for one in calls)
    assert all(answers for one in calls for answers in one)


def rank(folder: Path) -> None:
    """One of two ranks."""
    rows = [{"prompt": [3, 4], "answer": "easy" if place == 0 else "hard"} for place in range(5)]
    strategy = DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    data = PromptDataModule(rows, 2, shuffle=False, epoch_length=2)
    fit(tiny_module(rewards=right), callbacks=[DynamicSampling()], data=data, devices=2, strategy=strategy)
    torch.save(CALLS, folder / str(torch.distributed.get_rank()))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
