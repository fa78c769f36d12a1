"""Servers of ``lightning-rl ray``: a lost one is listed again at another address, and a run loses no sample."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit import sorting_run
from kit.clusters import start_cluster
from kit.ray_command import RayCommand
from kit.sorting_run import task

pytest.importorskip("ray")
ROLLOUTS, SAMPLES = 12, 256


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def servers() -> list[psutil.Process]:
    """Return the processes of ``lightning-rl serve``."""
    return [one for one in psutil.process_iter(["cmdline"]) if "serve" in (one.info["cmdline"] or ())[3:4]]


WATCH = """
import os, signal, sys, time
import psutil
from lightning_rl import launched_servers

before = set(launched_servers())
mine = [one for one in psutil.process_iter(["cmdline"]) if sys.argv[1] in (one.info["cmdline"] or ())]
os.kill(next(one.pid for one in mine if "serve" in one.info["cmdline"][3:4]), signal.SIGKILL)
while len(now := set(launched_servers())) < 2 or now == before:
    time.sleep(1)
assert len(now & before) == 1
"""


def serve_arguments(folder: Path) -> str:
    """Write the configuration and the tokenizer of the task's policy, and return the arguments of its servers."""
    (folder / "weights").mkdir()
    policy = task.untrained_policy(0)
    policy.config.architectures = [type(policy).__name__]
    policy.config.save_pretrained(folder / "model")
    task.sorting_tokenizer().save_pretrained(folder / "model")
    options = "--block-size 32 --max-num-seqs 128 --kv-cache-memory-bytes 268435456"
    return f"{folder / 'model'} --dtype float32 --storage {folder / 'weights'} -- {options}"


@pytest.mark.nightly
def test_a_server_that_is_killed_is_listed_again_at_another_address(tmp_path: Path) -> None:
    serve = serve_arguments(tmp_path)
    (tmp_path / "watch.py").write_text(WATCH)
    with start_cluster((0, 1, 1, 1)):
        options = ["--servers", "2", "--serve", serve, "--max-restarts", "0", "--", tmp_path / "model"]
        ran = RayCommand(tmp_path, "watch.py", *options, limit=400)
        assert ran.finish() == 0, ran.output()


def node_of(process: psutil.Process, cluster: Any) -> Any:
    """Return the node on which a process runs."""
    parents = {parent.pid for parent in process.parents()}
    return next(
        node
        for node in cluster.list_all_nodes()
        if parents.intersection(one.process.pid for one in node.all_processes["raylet"])
    )


@pytest.mark.nightly
def test_a_run_ahead_on_two_servers_goes_on_though_the_node_of_one_is_lost(tmp_path: Path) -> None:
    serve = serve_arguments(tmp_path)
    with start_cluster((0, 1, 1, 1, 1, 1)) as cluster:
        recipe = [sorting_run.__file__, "--nodes", "2", "--servers", "2", "--serve", serve]
        ran = RayCommand(tmp_path, *recipe, "--", tmp_path, str(ROLLOUTS), limit=1800)
        ran.wait_for("checkpoints/step=3.ckpt")
        cluster.remove_node(node_of(servers()[-1], cluster), allow_graceful=False)
        assert ran.finish() == 0, ran.output()
    syncs = lines(tmp_path / "syncs.jsonl")
    assert max(sync["apart"] for sync in syncs) <= 1e-4
    found = [
        sample for rank in range(2) for line in lines(tmp_path / f"rollouts-{rank}.jsonl") for sample in line["ids"]
    ]
    assert sorted(found) == list(range(ROLLOUTS * SAMPLES)), "every sample once"
