"""A change of optimizer or schedule that was accepted holds in the first resumed step under every strategy.

Run as a script it is one rank: ``test_resume_changed_options.py FOLDER RANKS STRATEGY,... ROW,...``.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.first_step import FirstStep, SavesAt
from kit.ranks import STRATEGIES, TIMEOUT, run_ranks
from kit.support import fit, tiny_module, tiny_prompts
from lightning.pytorch.strategies import Strategy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lightning_rl import FSDP2Strategy
from lightning_rl.optimizers import warmup_then_linear

PLACES: dict[str, Callable[[], Strategy]] = {
    **STRATEGIES,
    "fsdp2 folder": lambda: FSDP2Strategy(process_group_backend="gloo", timeout=TIMEOUT),
}
ADAMW, MOMENTUM = partial(AdamW, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9)
WARMUP = warmup_then_linear(1, 9)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {  # name, old, new, if moments are kept
    "rate": ("optimizer", {"optimizer": ADAMW}, {"optimizer": partial(AdamW, lr=1e-3, betas=(0.5, 0.6))}, True),
    "kind": ("optimizer", {"optimizer": ADAMW}, {"optimizer": MOMENTUM}, False),
    "kind back": ("optimizer", {"optimizer": MOMENTUM}, {"optimizer": ADAMW}, False),
    "kernel": ("optimizer", {"optimizer": ADAMW}, {"optimizer": partial(AdamW, lr=1e-2, fused=True)}, True),
    "base rate": (
        "optimizer",
        {"optimizer": ADAMW, "lr_scheduler": WARMUP},
        {"optimizer": partial(AdamW, lr=1e-3), "lr_scheduler": WARMUP},
        True,
    ),
    "added": ("lr_scheduler", {"optimizer": ADAMW}, {"optimizer": ADAMW, "lr_scheduler": WARMUP}, True),
    "removed": ("lr_scheduler", {"optimizer": ADAMW, "lr_scheduler": WARMUP}, {"optimizer": ADAMW}, True),
    "cycle": (
        "lr_scheduler",
        {"optimizer": ADAMW, "lr_scheduler": WARMUP},
        {"optimizer": ADAMW, "lr_scheduler": partial(OneCycleLR, max_lr=1e-2, total_steps=9)},
        True,
    ),
}


def run(folder: Path, ranks: int, strategy: str, rows: list[str]) -> None:
    """Some rows on one rank of a process group; the weights after the step for a comparison of strategies."""
    where: dict[str, Any] = {"devices": ranks, "data": tiny_prompts(16, 4)}
    for row in rows:
        name, old, new, keeps = ROWS[row]
        path, first = folder / f"{strategy} {row}.ckpt", FirstStep()
        saves = SavesAt(2, path)
        fit(tiny_module(**old), callbacks=[saves], max_steps=2, strategy=PLACES[strategy](), **where)
        again = {"ckpt_path": path, "max_steps": 3}
        with pytest.raises(ValueError, match=rf"expected the configuration of .*(?s:.*)\['{name}'\]"):
            fit(tiny_module(**new), strategy=PLACES[strategy](), **again, **where)
        module = tiny_module(**new, allow_config_changes=[name])
        fit(module, callbacks=[first], strategy=PLACES[strategy](), **again, **where)
        steps: dict[str, Any] = {"steps": 2, "moments": saves.moments if keeps else ()}
        if strategy.startswith("zero"):
            first.check_options(new["optimizer"], new.get("lr_scheduler"), steps=2)
        else:
            first.check_optimizer(new["optimizer"], new.get("lr_scheduler"), **steps)
        weights = {key: w.cpu().clone() for key, w in module.parallel.full_parameters(module.required_policy)}
        if torch.distributed.get_rank() == 0:
            torch.save(weights, folder / f"{strategy} {row}.weights")


def test_accepted_changes_hold_on_one_rank_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(__file__, 1, tmp_path, "1", "fsdp2 folder", "rate,kind,added")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [name for name in PLACES if name not in ("ddp", "tensor")])
def test_accepted_changes_hold_on_two_ranks_as_under_ddp(strategy: str, tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, "2", f"ddp,{strategy}", ",".join(ROWS), timeout=600)
    for row in ROWS:
        expected, found = (torch.load(tmp_path / f"{name} {row}.weights") for name in ("ddp", strategy))
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5, msg=f"{row}: {name}")


if __name__ == "__main__":
    for each in sys.argv[3].split(","):
        run(Path(sys.argv[1]), int(sys.argv[2]), each, sys.argv[4].split(","))
