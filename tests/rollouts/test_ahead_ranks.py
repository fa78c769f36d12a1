"""Two ranks with rollouts in flight make the steps of one device, and fail together."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import TIMEOUT, run_ranks
from kit.rows import Rows
from kit.support import fit, tiny_module, tiny_policy, weights_of
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import TransformersEngine
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Completion, Request


class Failing(TransformersEngine):
    """Fails ahead of the trainer, on the second rank alone."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if threading.current_thread() is not threading.main_thread() and torch.distributed.get_rank() == 1:
            raise OSError("the engine is gone")
        return super().generate_batch(requests, logprobs=logprobs)


def run(ranks: int, engine: TransformersEngine | None = None) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """A float64 run of four rollouts with K = 2: weights and figures."""
    torch.set_num_threads(1)
    rows = Rows()
    several: dict[str, Any] = {"strategy": DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)}
    module = tiny_module(
        policy=partial(tiny_policy, dtype=torch.float64), optimizer=partial(SGD, lr=0.05),
        minibatches_per_rollout=2, max_staleness=1, engine=engine,
    )  # fmt: skip
    fit(module, callbacks=[TruncatedIS(), rows], devices=ranks, **(several if ranks > 1 else {}))
    return weights_of(module), rows.rows


@pytest.mark.nightly
def test_two_ranks_equal_one_device_and_fail_together(tmp_path: Path) -> None:
    weights, rows = run(1)
    run_ranks(__file__, 2, tmp_path)
    others, other_rows = torch.load(tmp_path / "two")
    assert max(float((others[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-12
    assert [row["staleness/mean"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    for row, other in zip(rows, other_rows, strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)


def rank(folder: Path) -> None:
    """One of two ranks."""
    found = run(2)
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "two")
    mine = torch.distributed.get_rank() == 1
    kind, message = (
        (OSError, "the engine is gone") if mine else (RuntimeError, r"generation on every rank, .* \[1\]: s")
    )
    with pytest.raises(kind, match=message):
        run(2, Failing())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
