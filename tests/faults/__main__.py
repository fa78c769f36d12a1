"""Quiet faults, each put from outside into a real fit; the audit has to name the check and the culprit of every one.

``python -m tests.faults [part of a name ...]`` prints a table and ends with ``faults injected=N caught=N``;
``python -m tests.faults --effective [part of a name ...]`` shows instead what each fault changes in a run without the
audit, and ends with ``faults injected=N effective=N``; ``--missed`` takes those that are known to be missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kit.support import tiny_prompts

from faults.fault import Fault
from faults.on_ranks import beside_each_other, of_strategy, run_on_ranks
from faults.runs import TEMPERATURE, differences, faulty_run, run_with, sound_run
from faults.tables import FAULTS, MISSED
from lightning_rl.audit import SignalAudit

REFUSALS = {"CanaryError": "canary", "EditError": "edits", "EngineError": "answers"}

__all__ = ["FAULTS", "MISSED", "TEMPERATURE", "Fault", "effect_of", "found_by_audit"]


def found_by_audit(fault: Fault | None, kept: Path | None = None) -> list[tuple[str, str]]:
    """Check and culprit of every finding of a short run, with the fault or without one; files go to ``kept``."""
    if fault and fault.ranks > 1 and not beside_each_other():
        return [(check, culprit) for found in run_on_ranks(fault, "audit") for check, culprit in found]
    audit = SignalAudit(1)
    callbacks, options, data = fault.parts() if fault else ([], {}, tiny_prompts(16, 4))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_with(
            [*callbacks, audit],
            options,
            data,
            folder=kept or Path(folder),
            max_steps=fault.max_steps if fault else 6,
            trainer=of_strategy(fault) if fault else {},
            patches=fault.patches if fault else (),
        )
    refused_by = REFUSALS.get(outcome.raised.partition(":")[0])
    if refused_by is not None:  # what needs no audit: it is refused before anything trains on it
        return [(refused_by, outcome.raised)]
    if outcome.raised and not audit.findings:  # what counts is what was found before
        sys.stderr.write(f"{fault.name if fault else 'no fault'}: {outcome.raised}\n")
    return [(finding.check, finding.culprit) for finding in audit.findings]


def effect_of(fault: Fault) -> list[str]:
    """What the fault changes in a run: weights, figures, rollouts. Nothing if it raises, because it is not quiet."""
    faulty, sound = faulty_run(fault), sound_run(fault)
    if sound.raised:
        raise RuntimeError(f"expected a run without the fault {fault.name!r}, got {sound.raised}")
    if faulty.raised.startswith("CanaryError"):
        return ["canary"]  # which is the core's own check, and part of the table
    if faulty.raised:
        sys.stderr.write(f"{fault.name}: {faulty.raised}\n")
        return []
    return differences(faulty, sound)


def main(arguments: Sequence[str]) -> int:
    """Runs the faults, prints a table, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="part of a name", help="faults with such a name; all without one")
    parser.add_argument("--effective", action="store_true", help="show what each changes in a run without the audit")
    parser.add_argument("--missed", action="store_true", help="take those that are known to be missed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = MISSED if given.missed else (*FAULTS, *MISSED) if given.names else FAULTS
    chosen = [fault for fault in known if not given.names or any(part in fault.name for part in given.names)]
    good = sum(_show_effect(fault) if given.effective else _show_findings(fault) for fault in chosen)
    sys.stdout.write(f"faults injected={len(chosen)} {'effective' if given.effective else 'caught'}={good}\n")
    return 0 if good == len(chosen) else 1


def _show_findings(fault: Fault) -> bool:
    findings = found_by_audit(fault)
    right = [finding for finding in findings if fault.named_by(*finding)]
    verdict = f"{right[0][0]}: {right[0][1]}" if right else f"MISSED, found {sorted(set(findings))[:3]}"
    _line(fault, verdict)
    return bool(right)


def _show_effect(fault: Fault) -> bool:
    changed = effect_of(fault)
    _line(fault, f"changes {len(changed)}: {', '.join(changed[:3])}" if changed else "NOTHING")
    return bool(changed)


def _line(fault: Fault, verdict: str) -> None:
    sys.stdout.write(f"{fault.name:<60} {verdict}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
