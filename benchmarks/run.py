"""Run every benchmark in turn and print one table of all bounds.

    python benchmarks/run.py
    python benchmarks/run.py --only head,filters
    python benchmarks/run.py --quick true

A failure does not stop the others. Tables, machine and versions are in ``build/bench/<name>.json``, output in
``build/bench/<name>.txt``. Exits with status 1 if a bound does not hold or a benchmark fails. ``--quick true`` uses
small sizes to test the benchmarks; the figures are not meaningful.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jsonargparse import auto_cli
from measure import RESULTS, ROOT, limit, verdict

OWN, TRL, VLLM = Path(sys.executable), ROOT / ".venv-trl/bin/python", ROOT / ".venv-vllm/bin/python"
RAY = ROOT / ".venv-adapters/ray/bin/python"
Row = tuple[str, str, str, str, str]


class Benchmark(NamedTuple):
    """A script: what makes it quick, what runs it, and what it needs besides."""

    name: str
    quick: str = "--quick true"
    python: Path = OWN
    needs: Path = OWN


BENCHMARKS = (
    Benchmark("against_trl", needs=TRL),
    Benchmark("bound"),
    Benchmark("update"),
    Benchmark("compile"),
    Benchmark("generation", python=VLLM if VLLM.exists() else OWN),
    Benchmark("head"),
    Benchmark("filters"),
    Benchmark("audit"),
    Benchmark("fixed_costs"),
    Benchmark("consistency", "--rollouts 6 --rounds 1"),
    Benchmark("weight_sync"),
    Benchmark("real_model", "--only float32", needs=ROOT / "models" / "SmolLM2-135M-Instruct"),
    Benchmark("weight_streaming", "--vocabulary 512 --width 64 --layers 2 --inner 128"),
    Benchmark("weight_transfer", "--layers 1 --pushes 1", python=VLLM, needs=VLLM),
    Benchmark("loading"),
    Benchmark("growth"),
    Benchmark("pipelining", "--rollouts 12 --step 0.1 --rounds 1 --width 32 --layers 1"),
    Benchmark("quantized_rollouts", '--engines ["full","int3"] --seeds 1 --rollouts 2'),
    Benchmark("prefill"),
    Benchmark("curriculum", "--seeds [0] --rollouts 4"),
    Benchmark("summaries", "--seeds 1"),
    Benchmark("ray_workers", python=RAY, needs=RAY),
    Benchmark("server_requests", "--number 200 --rounds 1"),
    Benchmark("conversations", "", python=VLLM, needs=VLLM),
)


def rows_of(benchmark: Benchmark, *, quick: bool) -> Iterator[Row]:
    """Run it, and says what became of each of its bounds, or of itself if it has none."""
    name, _, python, needs = benchmark
    if not needs.exists():
        yield name, f"needs {needs.relative_to(ROOT)}", "", "", "SKIP"
        return
    written, said = RESULTS / f"{name}.json", RESULTS / f"{name}.txt"
    written.unlink(missing_ok=True)
    command = [python, Path(__file__).with_name(f"{name}.py"), *(benchmark.quick.split() if quick else [])]
    print(f"{name}: {said.relative_to(ROOT)}", flush=True)
    with said.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    bounds = json.loads(written.read_text())["bounds"] if written.exists() else {}
    for what, bound in bounds.items():
        yield name, what, f"{bound['value']:.4g}", limit(bound), verdict(bound)
    if not bounds or (status and all(bound["holds"] for bound in bounds.values())):
        yield name, "status at its end", str(status), "0", "FAIL" if status else "PASS"


def main(*, only: str = "", quick: bool = False) -> None:
    """Run all, or those that are named, with commas between them."""
    chosen = only.split(",") if only else [benchmark.name for benchmark in BENCHMARKS]
    unknown = set(chosen) - {benchmark.name for benchmark in BENCHMARKS}
    if unknown:
        raise ValueError(f"expected names among {[each.name for each in BENCHMARKS]}, got {sorted(unknown)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = [row for each in BENCHMARKS if each.name in chosen for row in rows_of(each, quick=quick)]
    table = [("benchmark", "bound", "value", "limit", ""), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for row in table:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if any(row[-1] == "FAIL" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
