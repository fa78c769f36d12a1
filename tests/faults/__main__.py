"""Quiet faults, each put from outside into a real fit; the audit has to name the check and the culprit of every one.

``python -m tests.faults [part of a name ...]`` prints a table and ends with ``faults injected=N caught=N``.
"""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from torch.optim import AdamW

from faults.fault import Fault
from faults.table import FAULTS
from lightning_rl import EngineError
from lightning_rl.audit import SignalAudit
from lightning_rl.edits import EditError
from lightning_rl.generation.weights.canary import CanaryError

TEMPERATURE = 0.5
REFUSALS: dict[type[Exception], str] = {CanaryError: "canary", EditError: "edits", EngineError: "answers"}


def found_by_audit(fault: Fault | None, kept: Path | None = None) -> list[tuple[str, str]]:
    """Check and culprit of every finding of a short run, with the fault or without one; files go to ``kept``."""
    options = {key: value() if key == "engine" else value for key, value in (fault.options if fault else {}).items()}
    audit = SignalAudit(1)
    settings = {"temperature": TEMPERATURE, "optimizer": partial(AdamW, lr=0.05)}
    with ExitStack() as stack, warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for patched in fault.patches if fault else ():
            stack.enter_context(patched)
        callbacks = fault.callbacks() if fault else []
        module = tiny_module(**{**settings, "policy": tiny_policy, **options})
        try:
            fit(
                module,
                callbacks=[*callbacks, audit],
                data=tiny_prompts(16, 4),
                default_root_dir=kept or folder,
                max_steps=6,
            )
        except Exception as raised:  # noqa: BLE001  # a fault may break the run as well; what counts is what was found
            for kind, refused_by in REFUSALS.items():  # what needs no audit: it is refused before anything trains
                if isinstance(raised, kind):
                    return [(refused_by, str(raised))]
            if not audit.findings:
                sys.stderr.write(f"{fault.name if fault else 'no fault'}: {raised}\n")
    return [(finding.check, finding.culprit) for finding in audit.findings]


def main(wanted: Sequence[str]) -> int:
    """Runs the faults, prints a table, and returns the exit code."""
    torch.set_num_threads(1)
    chosen = [fault for fault in FAULTS if not wanted or any(part in fault.name for part in wanted)]
    caught = 0
    for fault in chosen:
        findings = found_by_audit(fault)
        right = [finding for finding in findings if fault.named_by(*finding)]
        caught += bool(right)
        verdict = f"{right[0][0]}: {right[0][1]}" if right else f"MISSED, found {sorted(set(findings))[:3]}"
        sys.stdout.write(f"{fault.name:<50} {verdict}\n")
        sys.stdout.flush()
    sys.stdout.write(f"faults injected={len(chosen)} caught={caught}\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
