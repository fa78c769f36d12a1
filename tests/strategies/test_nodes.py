"""Two nodes of one process each, started by torchrun as on two machines, train like one device."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.ranks import STRATEGIES, free_port
from kit.strategy_cases import run

STRATEGY = "fsdp2"


@contextmanager
def nodes(number: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One torchrun for each node, in a process group of its own; nothing of them is left behind."""
    there = ["--nnodes", str(number), "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    there += ["--master_port", str(free_port())]
    places = os.pathsep.join(str(Path(__file__).parents[up]) for up in (1, 2))
    shared = {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(number):
            command = [sys.executable, "-m", "torch.distributed.run", *there, "--node_rank", str(rank)]
            with (folder / f"node{rank}").open("wb") as output:
                started.append(
                    subprocess.Popen(
                        [*command, __file__, str(number), str(folder)],
                        env={**os.environ, **shared}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its worker, which has a session of its own
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@pytest.mark.slow
def test_two_nodes_equal_one_device(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as started:
        end = time.monotonic() + 240
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() for process in started):
                break
            time.sleep(0.1)
    said = "\n".join((tmp_path / f"node{rank}").read_text()[-3000:] for rank in range(2))
    assert [process.returncode for process in started] == [0, 0], said
    expected, found = run("critic", torch.float64)["weights"], torch.load(tmp_path / "weights")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).abs().max()) <= 1e-9 * float(weight.abs().max()), name


if __name__ == "__main__":
    result = run("critic", torch.float64, num_nodes=int(sys.argv[1]), devices=1, strategy=STRATEGIES[STRATEGY]())
    if torch.distributed.get_rank() == 0:
        torch.save(result["weights"], Path(sys.argv[2]) / "weights")
