"""kill -9 of a rank or of a node under torchrun: the run comes back by itself, and ends as if nothing had happened."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import killed_run
from kit.agents import Agents

RANKS = 2


def agents_of(folder: Path, kind: str, nodes: int) -> Agents:
    folder.mkdir()
    command = [killed_run.__file__, folder, kind, str(nodes), "1"]
    return Agents(folder, command, nodes=nodes, devices=RANKS // nodes)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of undisturbed runs on one node, by kind."""

    @cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / kind
        with agents_of(folder, kind, 1) as agents:
            agents.finish()
        return folder

    return run


def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result-{rank}") for rank in range(RANKS)]


def check_equal(folder: Path, undisturbed: Path) -> None:
    for result, expected in zip(results(folder), results(undisturbed), strict=True):
        assert result["steps"] == expected["steps"] == 16 and result["states"] == expected["states"]
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert torch.equal(result["weights"][name], weight), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("ddp", 1),
        ("ddp", 0),
        ("fsdp2", 1),
        ("fsdp2", 0),
    ],
)
def test_a_rank_that_is_killed_comes_back_by_itself_and_the_run_ends_bitwise_equal(
    kind: str, rank: int, whole_run: Callable[[str], Path], tmp_path: Path
) -> None:
    with agents_of(tmp_path / "killed", kind, 1) as killed:
        killed.wait_for("step=5.ckpt")
        lives = [killed.process(other) for other in range(RANKS)]
        killed.kill_rank(rank)
        killed.finish()
        lives += [killed.process(other) for other in range(RANKS)]
    assert len(set(lives)) == 2 * RANKS, "all ranks restarted"
    check_equal(tmp_path / "killed", whole_run(kind))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_node_that_is_lost_and_replaced_lets_the_run_end_bitwise_equal(
    kind: str, whole_run: Callable[[str], Path], tmp_path: Path
) -> None:
    with agents_of(tmp_path / "killed", kind, 2) as killed:
        killed.wait_for("step=5.ckpt")
        killed.kill_node()
        killed.start()
        killed.finish()
    check_equal(tmp_path / "killed", whole_run(kind))
