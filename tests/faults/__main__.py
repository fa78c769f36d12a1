"""Inject quiet faults into a fit, one at a time: the audit must name the check and the culprit of each.

``python -m tests.faults [part of a name ...]`` prints a table and ends with ``faults injected=N caught=N``.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.support import tiny_prompts

from faults.fault import Fault
from faults.on_ranks import is_rank, run_on_ranks, trainer_options
from faults.runs import audit_run
from faults.tables import FAULTS

REFUSALS = {"CanaryError": "canary", "EditError": "edits", "EngineError": "answers", "RepeatedPromptError": "prompts"}


def found_by_audit(fault: Fault | None, kept: Path | None = None) -> list[tuple[str, str]]:
    """Return check and culprit of every finding of a short run; evidence is written to ``kept``."""
    if fault and fault.ranks > 1 and not is_rank():
        return run_on_ranks(fault)
    callbacks, options, data = fault.parts() if fault else ([], {}, tiny_prompts(16, 4))
    with tempfile.TemporaryDirectory() as folder:
        findings, raised = audit_run(
            callbacks,
            options,
            data,
            folder=kept or Path(folder),
            max_steps=fault.max_steps if fault else 6,
            trainer=trainer_options(fault) if fault else {},
            patches=fault.patches if fault else (),
        )
    refused_by = REFUSALS.get(raised.partition(":")[0])  # found without an audit, before anything trains on it
    return findings if refused_by is None else [(refused_by, raised)]


def main(names: Sequence[str]) -> int:
    """Run the faults whose name contains one of the given parts, print a table, and return the exit code."""
    torch.set_num_threads(1)
    chosen = [fault for fault in FAULTS if not names or any(part in fault.name for part in names)]
    caught = 0
    for fault in chosen:
        findings = found_by_audit(fault)
        right = [finding for finding in findings if fault.named_by(*finding)]
        verdict = f"{right[0][0]}: {right[0][1]}" if right else f"MISSED, found {sorted(set(findings))[:3]}"
        sys.stdout.write(f"{fault.name:<60} {verdict}\n")
        sys.stdout.flush()
        caught += bool(right)
    sys.stdout.write(f"faults injected={len(chosen)} caught={caught}\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
