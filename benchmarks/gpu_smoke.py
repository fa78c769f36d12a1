"""First contact with a GPU: 21 checks in one command, independent of each other.

    python benchmarks/gpu_smoke.py --first     # the six checks that decide most, in at most 9 minutes
    python benchmarks/gpu_smoke.py
    python benchmarks/gpu_smoke.py --only 4,5,10
    python benchmarks/gpu_smoke.py --tiny true

Made for one GPU of 80 GB or more with vLLM installed; a check without its hardware or package prints SKIPPED and the
reason. Each runs in a process with a time limit, so that a crash, a hang or running out of memory fails only that
check; its output is in ``build/bench/gpu_smoke/<number>.txt``. ``--tiny true`` runs the possible checks on the CPU with
models of a few thousand parameters, to test the checks themselves.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpu_findings import CHECKS, Check
from jsonargparse import auto_cli
from measure import RESULTS, Report, describe

FOLDER = RESULTS / "gpu_smoke"
FIRST = ("16", "7", "13", "6", "10", "17")  # the most decisive first


class Outcome(NamedTuple):
    """Of a check."""

    check: Check
    verdict: str
    seconds: float
    figures: dict[str, Any]
    bounds: dict[str, Any]
    why: str = ""
    headlines: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the result with all figures."""
        bounds = [describe(what, bound) for what, bound in self.bounds.items()]
        figures = [f"{what}: {value}" for what, value in self.figures.items()]
        return [
            self._head() + (f": {self.why}" if self.why else ""),
            *(f"{' ' * 13}{line}" for line in (*bounds, *figures)),
        ]

    def summary(self) -> str:
        """Return the result in a line: the reason or the bounds that do not hold, and the headlines."""
        broken = [describe(what, bound) for what, bound in self.bounds.items() if not bound["holds"]]
        results = "; ".join(filter(None, (self.why, *broken, *self.headlines)))
        return self._head() + (f": {results}" if results else "")

    def _head(self) -> str:
        return f"{self.verdict:8}{self.check.number:>4} {self.check.title} ({self.seconds:.0f} s)"


def run(check: Check, *, tiny: bool, seconds: float, model: Path | None = None) -> Outcome:
    """Run a check in a process, and kill the process group at the end."""
    findings, said = (FOLDER / f"{check.number}.{kind}" for kind in ("jsonl", "txt"))
    findings.unlink(missing_ok=True)
    script = Path(__file__).with_name("gpu_findings.py")
    options = {"tiny": tiny, "seconds": seconds, "model": str(model) if model else None}
    command = [sys.executable, str(script), check.script, check.function, str(findings), json.dumps(options)]
    environment = {**os.environ, **dict(check.environment)}
    begin = time.monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            why = "" if process.wait(seconds) == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not at its end after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - begin
    found = [json.loads(line) for line in findings.read_text().splitlines()] if findings.exists() else []
    figures = {each["what"]: each["value"] for each in found if each["kind"] == "figure"}
    bounds = {each["what"]: each["bound"] for each in found if each["kind"] == "bound"}
    headlines = tuple(each["text"] for each in found if each["kind"] == "headline")
    skipped = next((each["why"] for each in found if each["kind"] == "skip"), "")
    if why:
        last = [line for line in said.read_text(errors="replace").splitlines() if line.strip()][-1:]
        why = "; ".join([why, *(line[:200] for line in last)])
    elif not (skipped or bounds):
        why = "nothing was held to a bound"
    failed = bool(why) or not all(bound["holds"] for bound in bounds.values())
    verdict = "FAIL" if failed else "SKIPPED" if skipped else "PASS"
    return Outcome(check, verdict, took, figures, bounds, why or skipped, headlines)


def main(
    *,
    first: bool = False,
    only: str = "",
    tiny: bool = False,
    minutes: float | None = None,
    each: float | None = None,
    model: Path | None = None,
) -> None:
    """Run the checks in turn, and print a summary.

    Args:
        first: the checks of a first contact, the most decisive one first, in 9 minutes and at most 120 seconds each.
        only: numbers of those to run, in this order, with commas between them.
        tiny: on the CPU with tiny models.
        minutes: for all of them, 45 by default; a check for which no time is left fails.
        each: limit in seconds of each check; by default that of the check.
        model: folder of a pretrained model for checks 6 and 16, such as that of `make model`.
    """
    checks = {check.number: check for check in CHECKS}
    numbers = [number.strip() for number in only.split(",")] if only else FIRST if first else [*checks]
    unknown = [number for number in numbers if number not in checks]
    if unknown:
        raise ValueError(f"expected numbers of checks among {', '.join(checks)}, got {', '.join(unknown)}")
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"expected a folder with config.json, got {model}: make model writes one")
    minutes, each = minutes or (9.0 if first else 45.0), each or (120.0 if first else math.inf)
    FOLDER.mkdir(parents=True, exist_ok=True)
    report, begin = Report("gpu_smoke", {"tiny": tiny}), time.monotonic()
    outcomes = list[Outcome]()
    for number in numbers:
        check, left = checks[number], begin + 60 * minutes - time.monotonic()
        if left > 1:
            outcome = run(check, tiny=tiny, seconds=min(check.seconds, each, left), model=model)
        else:
            outcome = Outcome(check, "FAIL", 0.0, {}, {}, f"no time is left of {minutes:g} minutes")
        print("\n".join(outcome.lines()), flush=True)
        prefix = f"{check.number} {check.title}"
        report.bounds |= {f"{prefix}: {what}": bound for what, bound in outcome.bounds.items()}
        if outcome.verdict == "FAIL" and outcome.why:
            report.bound(f"{prefix}: {outcome.why}", 1.0, at_most=0.0)
        report.tables[prefix] = outcome.figures
        outcomes.append(outcome)
    numbers_of = Counter(outcome.verdict for outcome in outcomes)
    report.floor("checks that were made", len(outcomes) - numbers_of["SKIPPED"], at_least=1)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in numbers_of.items())
    summary = [outcome.summary() for outcome in outcomes]
    report.tables["Summary"] = summary
    took = (time.monotonic() - begin) / 60
    print("\n".join([f"\nSummary: {counts} in {took:.1f} of {minutes:g} minutes", *summary]))
    if numbers_of["FAIL"]:
        print(f"output of each check: {FOLDER}/<number>.txt; meaning of failures: docs/performance.md")
    report.write()


def words_of(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with the value of ``--first``, which needs none there."""
    following = zip(arguments, [*arguments[1:], "--"], strict=True)
    return [f"{word}=true" if word == "--first" and after.startswith("--") else word for word, after in following]


if __name__ == "__main__":
    auto_cli(main, args=words_of(sys.argv[1:]), as_positional=False)
