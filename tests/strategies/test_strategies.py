"""Any strategy, any number of ranks: the same gradient norms, weights and metrics as one device."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from kit import strategy_cases
from kit.ranks import STRATEGIES, run_ranks
from kit.rows import SIGNS
from kit.strategy_cases import CASES, EXACT, Result, dtype_of, run


@cache
def one_device(case: str, dtype: torch.dtype) -> Result:
    """The same run on one device."""
    return run(case, dtype)


def check(folder: Path, strategy: str, case: str, against: str) -> None:
    """Compares with a case on one device: norms, weights and every metric, relative to the largest of its kind.

    A metric below 0.1 is the difference of log-probabilities that are larger, so it carries their rounding.
    """
    found, expected = torch.load(folder / f"{strategy} {case}"), one_device(against, dtype_of(strategy))
    exact = 1e-8 if case == "replayed" else 1e-9  # routers round to float32
    tolerance = exact if strategy in EXACT else 1e-5
    assert len(found["rows"]) == len(expected["rows"]) == 4
    assert len(expected["samples"]) == 64
    if strategy in EXACT:
        assert found["samples"] == expected["samples"], "bit for bit"
    for name, weight in expected["weights"].items():
        error = float((found["weights"][name] - weight).abs().max())
        assert error <= tolerance * float(weight.abs().max()) + 1e-12, f"{name} differs by {error}"
    assert found["weights"].keys() == expected["weights"].keys()
    for key in expected["rows"][0].keys() - SIGNS:
        values = [row[key] for row in expected["rows"]]
        largest = max([abs(value) for value in values if math.isfinite(value)], default=0.0)
        theirs = [row[key] for row in found["rows"]]
        assert theirs == pytest.approx(values, rel=0, abs=tolerance * max(largest, 0.1), nan_ok=True), key


def runs(folder: Path, ranks: int, strategy: str, cases: list[str]) -> None:
    """Runs all cases in one process group, then compares each with one device."""
    run_ranks(strategy_cases.__file__, ranks, folder, str(ranks), strategy, ",".join(cases), timeout=600)
    for case in cases:
        check(folder, strategy, case, "checkpointing" if case == "compiled" else case)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_equal_one_device(strategy: str, tmp_path: Path) -> None:
    """The second case has a rank with nothing to train."""
    runs(tmp_path, 2, strategy, ["critic", "masked", "pictures", "programs"])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_case_equals_one_device(strategy: str, tmp_path: Path) -> None:
    replayed = ["replayed"] if strategy != "tensor" else []  # tensor parallelism splits no experts
    compiled = ["compiled"] if strategy in ("ddp", "fsdp2") else []
    runs(tmp_path, 2, strategy, [*CASES, *replayed, *compiled])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_ranks_equal_one_device(strategy: str, tmp_path: Path) -> None:
    runs(tmp_path, 4, strategy, ["critic", "masked", "contexts", "programs"])


@pytest.mark.nightly
def test_models_of_several_families_split_their_layers(tmp_path: Path) -> None:
    runs(tmp_path, 2, "tensor", ["qwen3", "llama", "gemma3_text"])


def test_two_microbatches_are_one_on_one_device() -> None:
    many, one = one_device("plain", torch.float64), one_device("one microbatch", torch.float64)
    for name, weight in many["weights"].items():
        assert float((one["weights"][name] - weight).abs().max()) < 1e-12
