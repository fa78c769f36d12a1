"""First contact with a GPU: what fails is said, what cannot run is skipped, and nothing stops the other checks."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from kit.fake_vllm import fake_vllm

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CONTRIVED = """
import os


def passes(findings):
    findings.at_most("error", 0.5, 1.0)
    findings.figure("speed", 3.0)


def breaks_its_bound(findings):
    findings.at_most("error", 0.5, 0.0)


def crashes(findings):
    findings.at_most("error", 0.5, 1.0)
    os._exit(9)


def raises(findings):
    raise ValueError("what is wrong")


def hangs(findings):
    import threading

    threading.Event().wait()


def says_nothing(findings):
    pass


def has_a_part_that_fails(findings):
    with findings.part("first"):
        raise ValueError("what is wrong")
    with findings.part("second"):
        findings.at_least("speed", 2.0, 1.0)


def needs_a_package(findings):
    from gpu_findings import needs

    needs("no_such_package")


def needs_a_device(findings):
    from gpu_findings import needs_gpu

    needs_gpu(findings)
"""


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with contrived checks; what it writes goes elsewhere."""
    (tmp_path / "contrived.py").write_text(CONTRIVED)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = importlib.util.spec_from_file_location("benchmarks_gpu_smoke", BENCHMARKS / "gpu_smoke.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    measure = sys.modules["measure"]
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def outcome(smoke: ModuleType, function: str, seconds: float = 60) -> tuple[str, str]:
    run = smoke.run(smoke.Check(1, function, "contrived", function, seconds), tiny=True, seconds=seconds)
    return run.verdict, "\n".join(run.lines())


@pytest.mark.parametrize(
    ("function", "verdict", "said"),
    [
        ("passes", "PASS", "PASS error: 0.5 (at most 1)"),
        ("breaks_its_bound", "FAIL", "FAIL error: 0.5 (at most 0)"),
        ("crashes", "FAIL", "ended with status 9"),
        ("raises", "FAIL", "ended with status 1; ValueError: what is wrong"),
        ("says_nothing", "FAIL", "nothing was held to a bound"),
        ("has_a_part_that_fails", "FAIL", "first, error: ValueError: what is wrong"),
        ("needs_a_package", "SKIPPED", "no_such_package is not installed"),
        ("needs_a_device", "SKIPPED", "needs CUDA"),
    ],
)
def test_a_check_says_how_it_ended(smoke: ModuleType, function: str, verdict: str, said: str) -> None:
    ended, lines = outcome(smoke, function)
    assert ended == verdict
    assert said in lines


def test_a_check_that_hangs_is_ended_and_fails(smoke: ModuleType) -> None:
    verdict, lines = outcome(smoke, "hangs", 1)
    assert verdict == "FAIL"
    assert "not at its end after 1 s" in lines


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("functions", "status"),
    [(["passes", "needs_a_device"], None), (["breaks_its_bound", "hangs", "crashes", "passes"], 1)],
    ids=["all is well", "three fail"],
)
def test_every_check_runs_and_the_status_says_whether_one_failed(
    smoke: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    functions: list[str],
    status: int | None,
) -> None:
    checks = tuple(smoke.Check(n, name, "contrived", name, 2) for n, name in enumerate(functions, 1))
    monkeypatch.setattr(smoke, "CHECKS", checks)
    if status is None:
        smoke.main(tiny=True)
    else:
        with pytest.raises(SystemExit) as ends:
            smoke.main(tiny=True)
        assert ends.value.code == status
    said = capsys.readouterr().out
    assert all(f" {number} {name} (" in said for number, name in enumerate(functions, 1))
    bounds = json.loads((tmp_path / "gpu_smoke.json").read_text())["bounds"]
    failed = [what for what, bound in bounds.items() if not bound["holds"]]
    assert len(failed) == (0 if status is None else 3)


@pytest.mark.parametrize("only", ["20", "two"])
def test_a_number_of_no_check_is_refused(smoke: ModuleType, only: str) -> None:
    with pytest.raises(ValueError, match=r"expected numbers of checks from 1 to 19, got "):
        smoke.main(only=only, tiny=True)


def test_every_check_has_a_function(smoke: ModuleType) -> None:
    assert [check.number for check in smoke.CHECKS] == list(range(1, 20))
    for check in smoke.CHECKS:
        assert f"\ndef {check.function}(findings: Findings)" in (BENCHMARKS / f"{check.script}.py").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["stages", "requests", "embedded"])
def test_checks_in_the_configuration_of_the_recipes_pass_with_the_fake_of_vllm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    defaults = importlib.import_module("gpu_defaults")
    findings = importlib.import_module("gpu_findings").Findings(tmp_path / "findings.jsonl", tiny=True)
    with fake_vllm(gpus=1):
        getattr(defaults, name)(findings)
    if dist.is_initialized():  # vLLM leaves its process group
        dist.destroy_process_group()
    bounds = [line for line in map(json.loads, findings.path.read_text().splitlines()) if line["kind"] == "bound"]
    assert bounds and [line["what"] for line in bounds if not line["bound"]["holds"]] == []


@pytest.mark.nightly
def test_checks_that_have_a_meaning_on_a_cpu_pass_there_and_the_others_are_skipped() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_smoke.py"), "--tiny", "true", "--only", "1,3,4,14"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    ended = re.findall(r"^(PASS|FAIL|SKIPPED) +(\d+) .* \(\d+ s\)", run.stdout, re.MULTILINE)
    assert ended == [("PASS", "1"), ("SKIPPED", "3"), ("PASS", "4"), ("SKIPPED", "14")]
