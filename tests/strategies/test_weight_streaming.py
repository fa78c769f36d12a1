"""Streaming of full weights holds one parameter at a time beside the own shard, one FSDP unit under FSDP1."""

import json
from pathlib import Path

import pytest
import torch
from kit import streaming_memory
from kit.ranks import run_ranks
from kit.streaming_memory import peaks

SHAPE = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 512}
SMALL = 20_000  # bytes of everything that is no weight


def test_a_peak_is_what_was_held_at_once() -> None:
    def act() -> None:
        one = torch.ones(1000, dtype=torch.int64)
        two = torch.ones(3000, dtype=torch.int64)
        del one
        torch.ones(500, dtype=torch.int64)
        del two

    assert peaks(act)[0] == pytest.approx(32_000, abs=500)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategies",
    [["fsdp1", "fsdp2"], pytest.param(["zero3"], marks=pytest.mark.nightly)],
    ids=",".join,
)
def test_one_parameter_at_a_time(strategies: list[str], tmp_path: Path) -> None:
    run_ranks(streaming_memory.__file__, 2, tmp_path, ",".join(strategies), json.dumps(SHAPE))
    for strategy in strategies:
        found = json.loads((tmp_path / strategy).read_text())
        held = found["unit"] if strategy == "fsdp1" else found["parameter"]
        assert held <= found["own"] <= held + SMALL, (strategy, found)
