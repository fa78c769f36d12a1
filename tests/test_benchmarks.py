"""Benchmarks: counted work, bounds that can fail, and a runner that goes on after failures."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHARED = {
    "addition",
    "bare",
    "learning_curves",
    "measure",
    "paced",
    "run",
    "sides",
    "side_of_bare",
    "side_of_library",
    "side_of_trl",
    "workload",
}
OF_A_GPU = {path.stem for path in BENCHMARKS.glob("gpu_*.py")}  # by a separate command
OF_DATA = {"score_gsm8k"}  # takes the folder of a data set


def script(name: str) -> ModuleType:
    """A file of the folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and named tuples look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measure() -> ModuleType:
    return script("measure")


def test_a_variant_that_works_on_other_tokens_is_refused(measure: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="expected 5 tokens from short, got 4"):
        measure.take_turns({"whole": lambda: 5, "short": lambda: 4}, 5, tokens=5)


def test_fewer_rounds_than_a_median_needs_are_refused(measure: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected at least 5 rounds, got 4"):
        measure.take_turns({"whole": lambda: 5}, 4, tokens=5)


def test_every_round_is_compared_with_the_round_beside_it(measure: ModuleType) -> None:
    slow, fast = measure.Seconds([2.0, 9.0], [4.0, 9.0]), measure.Seconds([1.0, 3.0], [1.0, 3.0])
    assert slow.of_all(fast) == measure.Seconds([2.0, 3.0], [4.0, 3.0])


def test_a_seed_is_one_measurement_of_a_paired_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rewards = [(0, 0.5, 0.25), (0, 0.75, 0.75), (1, 0.25, 0.5), (1, 1.0, 0.5), (2, 0.5, 0.5), (2, 1.0, 0.25)]
    points = [{"seed": seed, "library": own, "TRL": other} for seed, own, other in rewards]
    mean, error = script("learning_curves").difference(points)  # of 0.125, 0.125 and 0.375
    assert mean == pytest.approx(5 / 24)
    assert error == pytest.approx(1 / 12)


def test_the_last_number_of_a_message_is_its_answer() -> None:
    texts = ["5 + 13 = 18.", "18 = 5 + 13", "118", "none", ""]
    rewards = script("addition").last_number_matches([[{"content": text}] for text in texts], answer=["18"] * 5)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_run_asks_for_no_sum_twice() -> None:
    rows = script("addition").sums(256, seed=0)
    assert len({row["prompt"][-1]["content"] for row in rows}) == 256
    assert rows != script("addition").sums(256, seed=1)


@pytest.mark.parametrize(("value", "status"), [(1.0, None), (1.1, 1)])
def test_a_bound_that_does_not_hold_ends_a_benchmark_with_status_1(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, status: int | None
) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "build")
    report = measure.Report("a", {"other": "1.0"})
    report.bound("seconds", value, at_most=1.0)
    report.floor("speed", 2.0, at_least=2.0)
    if status is None:
        report.finish()
    else:
        with pytest.raises(SystemExit) as ends:
            report.finish()
        assert ends.value.code == status
    assert (tmp_path / "build" / "a.json").exists()


def test_the_runner_runs_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = {each.name for each in script("run").BENCHMARKS}
    assert names == {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED - OF_DATA - OF_A_GPU


@pytest.mark.nightly
def test_the_runner_goes_on_after_a_bound_that_fails_and_a_benchmark_that_ends_early(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("run.py", "measure.py"):
        shutil.copy(BENCHMARKS / name, folder)
    bound = '{"bounds": {"seconds": {"value": 2, "at_most": 1, "holds": %s}}}'
    write = "from pathlib import Path\nPath(__file__).parents[1].joinpath('build/bench/{}.json').write_text('{}')\n"
    (folder / "update.py").write_text(write.format("update", bound % "false") + "raise SystemExit(1)")
    (folder / "head.py").write_text("raise ValueError('too small')")
    (folder / "filters.py").write_text(write.format("filters", bound % "true"))
    command = [sys.executable, str(folder / "run.py"), "--only", "filters,head,update"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = {tuple(line.split()) for line in run.stdout.splitlines()}
    assert run.returncode == 1, run.stderr
    assert ("update", "seconds", "2", "at", "most", "1", "FAIL") in rows
    assert ("head", "status", "at", "its", "end", "1", "0", "FAIL") in rows
    assert ("filters", "seconds", "2", "at", "most", "1", "PASS") in rows
    assert "too small" in (tmp_path / "build/bench/head.txt").read_text()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_policy_learns_what_a_summary_has_to_keep_only_if_summaries_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    summaries = script("summaries")
    assert summaries.accuracy(0, masked=False)[1] >= summaries.TRAINED
    assert summaries.accuracy(0, masked=True)[1] <= summaries.MASKED
