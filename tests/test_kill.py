"""kill -9 at any moment of a run with checkpoints: what is started again ends as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import killed_run
from kit.forks import PATH, Fork
from kit.ranks import free_port

from lightning_rl.checkpointing import INTERRUPTED

LIMIT = 240.0  # seconds for a run; no test waits without one


class Run:
    """The processes of a run, all of which are killed together."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "started").unlink(missing_ok=True)
        self.folder, self.ranks = folder, killed_run.RANKS[kind]
        shared = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PATH}
        if self.ranks > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "tests"}
            shared |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        self.processes = list[Fork]()
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            output = folder / f"output-{rank}"
            output.touch()
            command = [killed_run.__file__, str(folder), kind, "1", "1"]
            self.processes.append(Fork(rank, command, {**shared, **own}, output))

    def wait_for(self, name: str = "started") -> None:
        """Wait until the run has written a file; it writes ``started`` when training begins."""
        end = time.monotonic() + LIMIT
        while not (self.folder / name).exists():
            assert all(process.poll() is None for process in self.processes) and time.monotonic() < end
            time.sleep(0.01)

    def finish(self) -> list[Any]:
        """Waits for its end; what each rank wrote."""
        end = time.monotonic() + LIMIT
        try:
            assert [process.wait(end - time.monotonic()) for process in self.processes] == [0] * self.ranks
        finally:
            self.kill()
        return [torch.load(self.folder / f"result-{rank}") for rank in range(self.ranks)]

    def kill(self) -> None:
        """Kill -9."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def check(folder: Path, kind: str, moments: int) -> None:
    """Kill runs at random moments, each in a separate folder."""
    whole = Run(folder / "whole", kind)
    whole.wait_for()
    begin = time.monotonic()
    expected = whole.finish()
    seconds, draw = time.monotonic() - begin, random.Random(0)
    assert [result["steps"] for result in expected] == [16] * len(expected)
    for number in range(moments):
        killed = Run(folder / str(number), kind)
        try:
            killed.wait_for()
            time.sleep(draw.random() * seconds)
        finally:
            killed.kill()
        for rank, result in enumerate(Run(folder / str(number), kind).finish()):
            assert result["steps"] == 16 and result["states"] == expected[rank]["states"]
            for name, weight in expected[rank]["weights"].items():
                assert torch.equal(result["weights"][name], weight), name


@pytest.mark.parametrize("kind", ["plain", "ahead filtered", "two ahead filtered", "ahead curriculum"])
def test_a_run_that_is_killed_ends_bitwise_equal(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, 1)


@pytest.mark.nightly
def test_sigterm_ends_a_process_with_143_and_what_is_started_again_ends_bitwise_equal(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", "ahead").finish()[0]
    stopped = Run(tmp_path / "stopped", "ahead")
    stopped.wait_for("step=3.ckpt")
    os.kill(stopped.processes[0].pid, signal.SIGTERM)
    assert stopped.processes[0].wait(30) == 143, "128 + SIGTERM, so that a scheduler starts it again"
    assert (tmp_path / "stopped" / INTERRUPTED).exists()
    again = Run(tmp_path / "stopped", "ahead").finish()[0]
    assert all(torch.equal(weight, again["weights"][name]) for name, weight in whole["weights"].items())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", killed_run.RANKS)
def test_a_run_killed_at_twenty_moments_ends_bitwise_equal(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, 20)
