"""First contact with a GPU: 19 checks in one command, independent of each other.

    python benchmarks/gpu_smoke.py
    python benchmarks/gpu_smoke.py --only 4,5,10
    python benchmarks/gpu_smoke.py --tiny true

Made for one GPU of 140 GB with vLLM installed; a check without its hardware or package prints SKIPPED and the reason.
Each runs in a process with a time limit, so that a crash, a hang or running out of memory fails only that check; its
output is in ``build/bench/gpu_smoke/<number>.txt``. ``--tiny true`` runs the possible checks on the CPU with models
of a few thousand parameters, to test the checks themselves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpu_findings import CHECKS, Check
from jsonargparse import auto_cli
from measure import RESULTS, Report, limit, verdict

FOLDER = RESULTS / "gpu_smoke"


class Outcome(NamedTuple):
    """Of a check."""

    check: Check
    verdict: str
    seconds: float
    figures: dict[str, Any]
    bounds: dict[str, Any]
    why: str = ""

    def lines(self) -> list[str]:
        """Summary of the result."""
        head = f"{self.verdict:8}{self.check.number:2} {self.check.title} ({self.seconds:.0f} s)"
        bounds = [
            f"{verdict(bound)} {what}: {bound['value']:.4g} ({limit(bound)})" for what, bound in self.bounds.items()
        ]
        figures = [f"{what}: {value}" for what, value in self.figures.items()]
        return [head + (f": {self.why}" if self.why else ""), *(f"{' ' * 11}{line}" for line in (*bounds, *figures))]


def run(check: Check, *, tiny: bool, seconds: float) -> Outcome:
    """Run a check in a process, and kill the process group at the end."""
    findings, said = (FOLDER / f"{check.number}.{kind}" for kind in ("jsonl", "txt"))
    findings.unlink(missing_ok=True)
    script = Path(__file__).with_name("gpu_findings.py")
    command = [sys.executable, str(script), check.script, check.function, str(findings), str(tiny)]
    begin = time.monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            why = "" if process.wait(seconds) == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not at its end after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - begin
    figures, bounds, skipped = _read(findings)
    if why:
        last = [line for line in said.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return Outcome(check, "FAIL", took, figures, bounds, "; ".join([why, *(line[:200] for line in last)]))
    if not all(bound["holds"] for bound in bounds.values()):
        return Outcome(check, "FAIL", took, figures, bounds)
    if skipped or bounds:
        return Outcome(check, "SKIPPED" if skipped else "PASS", took, figures, bounds, skipped)
    return Outcome(check, "FAIL", took, figures, bounds, "nothing was held to a bound")


def _read(findings: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Figures, bounds and why it was skipped, as far as the check came."""
    lines = findings.read_text().splitlines() if findings.exists() else []
    found = [json.loads(line) for line in lines]
    figures = {each["what"]: each["value"] for each in found if each["kind"] == "figure"}
    bounds = {each["what"]: each["bound"] for each in found if each["kind"] == "bound"}
    return figures, bounds, next((each["why"] for each in found if each["kind"] == "skip"), "")


def main(*, only: str = "", tiny: bool = False, minutes: float = 45.0) -> None:
    """Run the checks in turn.

    Args:
        only: numbers of those to run, with commas between them.
        tiny: on the CPU with tiny models.
        minutes: for all of them; a check for which no time is left fails.
    """
    known = [str(check.number) for check in CHECKS]
    numbers = [number.strip() for number in only.split(",")] if only else known
    unknown = sorted(set(numbers) - set(known))
    if unknown:
        raise ValueError(f"expected numbers of checks from 1 to {len(CHECKS)}, got {', '.join(unknown)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, end = Report("gpu_smoke", {"tiny": tiny}), time.monotonic() + 60 * minutes
    rows = []
    for check in CHECKS:
        if str(check.number) not in numbers:
            continue
        left = end - time.monotonic()
        if left > 1:
            outcome = run(check, tiny=tiny, seconds=min(check.seconds, left))
        else:
            outcome = Outcome(check, "FAIL", 0.0, {}, {}, f"no time is left of {minutes:g} minutes")
        print("\n".join(outcome.lines()), flush=True)
        prefix = f"{check.number} {check.title}"
        report.bounds |= {f"{prefix}: {what}": bound for what, bound in outcome.bounds.items()}
        if outcome.verdict == "FAIL" and outcome.why:
            report.bound(f"{prefix}: {outcome.why}", 1.0, at_most=0.0)
        report.tables[prefix] = outcome.figures
        rows.append((check.number, check.title, outcome.verdict, f"{outcome.seconds:.0f}", outcome.why))
    made = sum(verdict != "SKIPPED" for _, _, verdict, _, _ in rows)
    report.floor("checks that were made", made, at_least=1)
    report.rows("Checks", ("", "check", "verdict", "seconds", "why"), rows)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
