"""Two ranks under DDP make the same optimizer steps as one device."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support import fit, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import RLCallback
from lightning_rl.callbacks import OPSM, NoEOSMask, ReferenceKL, RolloutKL


class Rows(RLCallback):
    """Keeps every logged figure that does not measure time, over all ranks."""

    name = "rows"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        values = pl_module.run.metrics.values()
        self.rows.append(
            {key: value for key, value in values.items() if "time/" not in key and "per_second" not in key}
        )


def run(folder: Path, name: str, **trainer: Any) -> None:
    """A float64 run of two rollouts with K = 4, whose weights and figures rank 0 saves."""
    torch.set_num_threads(1)
    rows = Rows()
    module = tiny_module(
        policy=partial(tiny_policy, dtype=torch.float64), optimizer=partial(SGD, lr=0.05), engine_logprobs=True,
        minibatches=2, epochs=2, token_budget=20,
    )  # fmt: skip
    corrections = [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True), rows]
    fit(module, callbacks=corrections, data=tiny_prompts(8, 4), **trainer)
    if module.global_rank == 0:
        torch.save((weights_of(module), rows.rows), folder / name)


@pytest.mark.slow
def test_two_ranks_equal_one_device(tmp_path: Path) -> None:
    run(tmp_path, "one")
    subprocess.run([sys.executable, __file__, tmp_path], check=True, capture_output=True, timeout=300)
    weights, rows = torch.load(tmp_path / "one")
    others, other_rows = torch.load(tmp_path / "two")
    assert max(float((others[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-12
    assert len(rows) == len(other_rows) == 8
    for row, other in zip(rows, other_rows, strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)


if __name__ == "__main__":
    run(Path(sys.argv[1]), "two", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
