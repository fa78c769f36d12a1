"""Two machines as network namespaces, each with a node that trains and a real server."""

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit import namespaces, sorting_run
from kit.agents import Agents
from kit.namespaces import ADDRESSES, INTERFACE, two_machines
from kit.sorting_run import task

ROLLOUTS, PORT, SAMPLES = 52, 8000, 256
MODEL, CACHE = (
    ("--dtype", "float32"),
    ("--block-size", "32", "--max-num-seqs", "128", "--kv-cache-memory-bytes", str(2**28)),
)


class Server:
    """``lightning-rl serve`` on a machine."""

    def __init__(self, folder: Path, before: Sequence[str], address: str) -> None:
        self.url, self.folder, self.address = f"http://{address}:{PORT}", folder, address
        command = [sys.executable, "-m", "lightning_rl", "serve", str(folder / "model"), "--host", address]
        options = [
            "--port",
            str(PORT),
            *MODEL,
            "--storage",
            str(folder / "weights"),
        ]
        self._command = [*before, "env", f"GLOO_SOCKET_IFNAME={INTERFACE}", *command, *options, "--", *CACHE]
        self.start()

    def start(self) -> None:
        """Start the server; engines wait until it is ready."""
        with (self.folder / f"served-{self.address}").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def end(self, number: int) -> None:
        """End the server and its children by a signal."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        self.process.wait(60)
        assert psutil.wait_procs(family, timeout=30)[1] == []


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracy(path: Path) -> float:
    return json.loads(path.read_text())["val/reward/task"]


@pytest.mark.nightly
@pytest.mark.skipif(not namespaces.can_make(), reason="this user may make no network namespaces")
def test_a_run_on_two_machines_learns_though_a_server_a_rank_and_a_node_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.setenv("VLLM_API_KEY", secrets.token_urlsafe(32))
    policy = task.untrained_policy(0)
    policy.config.architectures = [type(policy).__name__]
    policy.config.save_pretrained(tmp_path / "model")
    task.sorting_tokenizer().save_pretrained(tmp_path / "model")
    with two_machines() as machines:
        servers = [Server(tmp_path, before, address) for before, address in zip(machines, ADDRESSES, strict=True)]
        before = [
            [*machine, "env", f"GLOO_SOCKET_IFNAME={INTERFACE}", f"LOCAL_ADDR={address}"]
            for machine, address in zip(machines, ADDRESSES, strict=True)
        ]
        command = [sorting_run.__file__, tmp_path, str(ROLLOUTS), *(server.url for server in servers)]
        run = Agents(tmp_path, command, nodes=2, devices=1, host=ADDRESSES[0], before=before, limit=2400)
        try:
            with run:
                run.wait_for("checkpoints/step=8.ckpt")
                servers[1].end(signal.SIGKILL)
                servers[1].start()
                run.wait_for("checkpoints/step=16.ckpt")
                run.kill_rank(1)
                run.wait_for("checkpoints/step=24.ckpt")
                run.kill_node()
                run.start()
                run.finish()
        finally:
            for server in servers:
                server.end(signal.SIGTERM)
    check(tmp_path)


def check(folder: Path) -> None:
    """Check accuracy, syncs and samples of the run."""
    before, after = (accuracy(folder / f"accuracy-{when}") for when in ("before", "after"))
    syncs = lines(folder / "syncs.jsonl")
    apart = max(sync["apart"] for sync in syncs)
    print(f"accuracy {before:.3f} -> {after:.3f}; {len(syncs)} syncs, engine against trainer {apart:.2g} at most")  # noqa: T201
    assert before <= 0.40 and after >= 0.75
    assert apart <= 1e-4 and {len(sync["engines"]) for sync in syncs} <= {1, 2}
    last = {min(line["ids"]) // SAMPLES: line["ids"] for line in lines(folder / "rollouts-0.jsonl")}
    other = {min(line["ids"]) // SAMPLES: line["ids"] for line in lines(folder / "rollouts-1.jsonl")}
    trained = [sample for ids in (last, other) for number in ids for sample in ids[number]]
    assert sorted(trained) == list(range(ROLLOUTS * SAMPLES)), "every sample once"
