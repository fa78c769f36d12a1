"""Several nodes on one machine: one torchrun per node."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kit.ranks import free_port

ROOT = Path(__file__).parents[2]


def run_nodes(number: int, command: Sequence[str], folder: Path, *, seconds: float = 240) -> str:
    """Runs a command on each of several nodes of one process, in a folder.

    Args:
        number: how many.
        command: script and arguments.
        folder: where it runs, and where each node's output goes.
        seconds: until all of them are ended.

    Returns:
        The end of each node's output.

    Raises:
        AssertionError: unless all of them end without an error; the message holds their output.
    """
    with _nodes(number, command, folder) as started:
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() for process in started):
                break
            time.sleep(0.1)
    said = "\n".join((folder / f"node{rank}").read_text()[-3000:] for rank in range(number))
    assert [process.returncode for process in started] == [0] * number, said
    return said


@contextmanager
def _nodes(number: int, command: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one torchrun per node, each in its process group; end all of them at exit."""
    there = ["--nnodes", str(number), "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    there += ["--master_port", str(free_port())]
    shared = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(number):
            agent = [sys.executable, "-m", "torch.distributed.run", *there, "--node_rank", str(rank)]
            with (folder / f"node{rank}").open("wb") as output:
                started.append(
                    subprocess.Popen(
                        [*agent, *command], cwd=folder, env={**os.environ, **shared},
                        stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its worker, which has a separate session
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
