"""A run with a fault on two ranks of one process group."""

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


def is_rank() -> bool:
    """Return True if this process is one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def trainer_options(fault: Fault) -> dict[str, Any]:
    """Return the options of the Trainer on this rank."""
    split = {"strategy": STRATEGIES["ddp"](), "devices": fault.ranks} if is_rank() else {}
    return {**fault.trainer, **split}


def run_on_ranks(fault: Fault) -> list[tuple[str, str]]:
    """Return check and culprit of the findings of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(__file__, fault.ranks, folder, fault.name)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(fault.ranks)]
    return [(check, culprit) for findings in found for check, culprit in findings]


def main(folder: str, name: str) -> None:
    """Run one rank."""
    from faults import __main__ as faults

    torch.set_num_threads(1)
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(faults.found_by_audit(fault)))


if __name__ == "__main__":
    main(*sys.argv[1:])
