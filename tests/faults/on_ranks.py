"""A run with a fault, or without it, on two ranks of one process group."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.ranks import STRATEGIES, run_ranks

from faults.fault import Fault


def beside_each_other() -> bool:
    """Whether this process is one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def of_strategy(fault: Fault) -> dict[str, Any]:
    """Options of the Trainer on this rank."""
    split = {"strategy": STRATEGIES["ddp"](), "devices": fault.ranks} if beside_each_other() else {}
    return {**fault.trainer, **split}


def run_on_ranks(fault: Fault, what: str) -> list[Any]:
    """What every rank of a run found (``"audit"``) or left behind (``"faulty"``, ``"sound"``), in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(__file__, fault.ranks, folder, fault.name, what)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(fault.ranks)]


def main(folder: str, name: str, what: str) -> None:
    """One rank."""
    from faults import __main__ as faults
    from faults import runs

    torch.set_num_threads(1)
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    if what == "audit":
        left: Any = json.loads(json.dumps(faults.found_by_audit(fault)))
    else:
        left = vars({"faulty": runs.faulty_run, "sound": runs.sound_run}[what](fault))
    torch.save(left, Path(folder) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
