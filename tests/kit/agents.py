"""A run under torchrun by the launch file of the repository: one agent per node, as on separate machines."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kit.ranks import free_port

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
LIMIT = 600.0  # seconds for a run


class Agents:
    """The agents of a run.

    Args:
        folder: of the run, in which every rank writes its process to ``process-R``, and what each agent says goes.
        command: script and arguments.
        nodes: how many agents.
        devices: processes of each.
        host: address of the first node.
        before: what stands before the command of each node, such as that which enters a network namespace.
        limit: seconds for the run; no test waits without one.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str | Path],
        *,
        nodes: int,
        devices: int,
        host: str = LOOPBACK,
        before: Sequence[Sequence[str]] = (),
        limit: float = LIMIT,
    ) -> None:
        self.folder, self.nodes, self.port, self.host = folder, nodes, free_port(), host
        self.limit = limit
        self._before = before or [()] * nodes
        self._agents: list[subprocess.Popen[bytes]] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        (folder / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        (folder / "torchrun").chmod(0o700)
        self._command = [
            str(ROOT / "launch" / "torchrun.sh"),
            host,
            str(nodes),
            str(devices),
            *map(str, command),
        ]
        self._environment = {
            **os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PORT": str(self.port),
            "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(self) -> None:
        """Starts the agent of one more node; ranks find each other at the first."""
        with (self.folder / f"said-{len(self._agents) + len(self._killed)}").open("wb") as said:
            self._agents.append(
                subprocess.Popen(
                    [*self._before[len(self._agents)], *self._command],
                    cwd=self.folder,
                    env=self._environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        while self.host == LOOPBACK and not self._listens():  # else it is known by its address
            self._check()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOOPBACK, self.port)) == 0

    def _check(self) -> None:
        time.sleep(0.02)
        assert time.monotonic() < self._end and all(agent.poll() in (None, 0) for agent in self._agents), self.said()

    def process(self, rank: int) -> int:
        """Of a rank, as it was when it last began to train."""
        return int((self.folder / f"process-{rank}").read_text())

    def wait_for(self, pattern: str) -> None:
        """Waits for a file in the folder."""
        while not any(self.folder.glob(pattern)):
            self._check()

    def kill_rank(self, rank: int) -> None:
        """Kill -9."""
        os.kill(self.process(rank), signal.SIGKILL)

    def kill_node(self) -> None:
        """Kill -9 of the newest agent, with its ranks."""
        agent = self._agents.pop()
        self._killed.append(agent)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        agent.wait()

    def finish(self) -> None:
        """Waits until every agent has ended without an error."""
        while any(agent.poll() is None for agent in self._agents):
            self._check()
        assert [agent.returncode for agent in self._agents] == [0] * self.nodes, self.said()

    def said(self) -> str:
        """The end of what every agent and its ranks said."""
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("said-*")))

    def __enter__(self) -> "Agents":
        """Starts every agent."""
        self._end = time.monotonic() + self.limit
        for _ in range(self.nodes):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves nothing behind."""
        for agent in self._agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)  # it ends its ranks, which have separate sessions
                try:
                    agent.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
