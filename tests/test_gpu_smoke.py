"""First contact with a GPU: what fails is said, what cannot run is skipped, and nothing stops the other checks."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def states_its_limit(findings):
    findings.at_most("error", 0.5, 1.0)
    findings.headline(f"{findings.seconds:g} s, {os.environ['OF_THE_CHECK']}")
    findings.headline("second")


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
    run = smoke.run(smoke.Check("1", function, "contrived", function, seconds), tiny=True, seconds=seconds)
    return run.verdict, "\n".join(run.lines())


@pytest.mark.parametrize(
    ("function", "verdict", "said"),
    [
        ("passes", "PASS", "PASS  error: 0.5 (at most 1)"),
        ("breaks_its_bound", "FAIL", "FAIL  error: 0.5 (at most 0)"),
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
    checks = tuple(smoke.Check(str(n), name, "contrived", name, 2) for n, name in enumerate(functions, 1))
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
    with pytest.raises(ValueError, match=rf"expected numbers of checks among 1, 2, .*, 7, 7b, 8, .* 19, got {only}"):
        smoke.main(only=only, tiny=True)


def test_a_folder_without_a_model_is_refused(smoke: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder with config.json, got .*: make model writes one"):
        smoke.main(only="6", tiny=True, model=tmp_path)


@pytest.mark.parametrize(
    ("options", "order", "seconds"),
    [
        ({"first": True}, ["16", "7", "13", "6", "10", "17"], {120.0}),
        ({"only": "10, 7b,2"}, ["10", "7b", "2"], {200.0, 90.0}),
        ({"only": "2,1", "each": 50.0}, ["2", "1"], {50.0, 30.0}),
        ({"only": "2,1", "minutes": 0.25}, ["2", "1"], {15.0}),
    ],
)
def test_checks_run_in_the_order_of_their_numbers_on_the_command_line_with_the_smallest_limit(
    smoke: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    order: list[str],
    seconds: set[float],
) -> None:
    ran = list[tuple[str, float]]()

    def note(check: Any, *, seconds: float, **_: Any) -> Any:
        ran.append((check.number, seconds))
        return smoke.Outcome(check, "PASS", 0.0, {}, {})

    monkeypatch.setattr(smoke, "run", note)
    smoke.main(tiny=True, **options)
    assert [number for number, _ in ran] == order
    assert {round(limit, 1) for _, limit in ran} == seconds


@pytest.mark.parametrize(
    ("written", "read"),
    [("--first", "--first=true"), ("--first --tiny true", "--first=true --tiny true"), ("--first false", None)],
)
def test_first_needs_no_value_on_the_command_line(smoke: ModuleType, written: str, read: str | None) -> None:
    assert smoke.words_of(written.split()) == (read or written).split()


def test_a_check_knows_its_limit_and_its_variables_and_its_headline_is_in_the_summary(smoke: ModuleType) -> None:
    check = smoke.Check("1", "title", "contrived", "states_its_limit", 60, (("OF_THE_CHECK", "7"),))
    outcome = smoke.run(check, tiny=True, seconds=50)
    assert outcome.summary().endswith("s): 50 s, 7; second")


def test_the_summary_of_a_failure_is_the_bound_that_does_not_hold(smoke: ModuleType) -> None:
    check = smoke.Check("1", "title", "contrived", "breaks_its_bound", 60)
    outcome = smoke.run(check, tiny=True, seconds=60)
    assert outcome.summary().startswith("FAIL       1 title (")
    assert outcome.summary().endswith("s): FAIL  error: 0.5 (at most 0)")


def test_every_check_has_a_function(smoke: ModuleType) -> None:
    numbers = [check.number for check in smoke.CHECKS]
    assert len(set(numbers)) == len(numbers) == 21
    for check in smoke.CHECKS:
        assert f"\ndef {check.function}(findings: Findings)" in (BENCHMARKS / f"{check.script}.py").read_text()


def test_a_profile_is_divided_by_kind_of_kernel_and_the_gaps_are_what_no_kernel_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    updates = importlib.import_module("gpu_updates")
    kernels = [  # name, milliseconds of its start and end
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", 0, 2),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>", 2, 3),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", 3, 7),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            6,
            8,
        ),  # two streams
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 10, 11),
        ("Memcpy DtoD (Device -> Device)", 11, 12),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", 15, 16),
        ("_rms_norm_forward_kernel", 16, 18),
    ]
    operations = [updates.Operation(name, 1e3 * (end - start), 1e3 * start, 1e3 * end) for name, start, end in kernels]
    assert updates.breakdown(operations[::-1]) == {
        "attention": 4,
        "matrix products": 3,
        "optimizer": 2,
        "copies": 2,
        "elementwise": 3,
        "gaps": 5,
    }


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.* weights with a gradient did not move")  # of bf16-true
@pytest.mark.parametrize("name", ["stages", "requests", "embedded"])
def test_checks_in_the_configuration_of_the_recipes_pass_with_the_fake_of_vllm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    defaults = importlib.import_module("gpu_defaults")
    findings = importlib.import_module("gpu_findings").Findings(tmp_path / "findings.jsonl", tiny=True)
    with fake_vllm(gpus=1) as fake:
        getattr(defaults, name)(findings)
        eager = [built.options.get("enforce_eager", False) for built in fake.built]
    assert all(eager)  # so that each starts in seconds
    if dist.is_initialized():  # vLLM leaves its process group
        dist.destroy_process_group()
    bounds = [line for line in map(json.loads, findings.path.read_text().splitlines()) if line["kind"] == "bound"]
    assert bounds and [line["what"] for line in bounds if not line["bound"]["holds"]] == []


@pytest.mark.nightly
def test_checks_that_have_a_meaning_on_a_cpu_pass_there_and_the_others_are_skipped() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_smoke.py"), "--tiny", "true", "--only", "14,1,3,4,7b"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    results, _, summary = run.stdout.partition("\nSummary: 3 SKIPPED, 2 PASS in ")
    for text in (results, summary):
        ended = re.findall(r"^(PASS|FAIL|SKIPPED) +(\w+) .* \(\d+ s\)", text, re.MULTILINE)
        assert ended == [("SKIPPED", "14"), ("PASS", "1"), ("SKIPPED", "3"), ("PASS", "4"), ("SKIPPED", "7b")]
