"""Two nodes of one process each, started by torchrun as on two machines, train like one device."""

import sys
from pathlib import Path

import pytest
import torch
from kit.nodes import run_nodes
from kit.ranks import STRATEGIES
from kit.strategy_cases import run

STRATEGY = "fsdp2"


@pytest.mark.nightly
def test_two_nodes_equal_one_device(tmp_path: Path) -> None:
    run_nodes(2, [__file__, "2", str(tmp_path)], tmp_path)
    expected, found = run("critic", torch.float64)["weights"], torch.load(tmp_path / "weights")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).abs().max()) <= 1e-9 * float(weight.abs().max()), name


if __name__ == "__main__":
    result = run("critic", torch.float64, num_nodes=int(sys.argv[1]), devices=1, strategy=STRATEGIES[STRATEGY]())
    if torch.distributed.get_rank() == 0:
        torch.save(result["weights"], Path(sys.argv[2]) / "weights")
