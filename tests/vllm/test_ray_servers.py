"""Servers of ``lightning-rl ray``: a lost one starts again on another node and joins, and no sample is lost."""

import json
import os
import signal
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


@pytest.mark.nightly
def test_a_run_ahead_on_two_servers_goes_on_though_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    policy = task.untrained_policy(0)
    policy.config.architectures = [type(policy).__name__]
    policy.config.save_pretrained(tmp_path / "model")
    task.sorting_tokenizer().save_pretrained(tmp_path / "model")
    options = "--block-size 32 --max-num-seqs 128 --kv-cache-memory-bytes 268435456"
    serve = f"{tmp_path / 'model'} --dtype float32 --storage {tmp_path / 'weights'} -- {options}"
    with start_cluster((0, 1, 1, 1, 1, 1)):
        recipe = [sorting_run.__file__, "--nodes", "2", "--servers", "2", "--serve", serve]
        ran = RayCommand(tmp_path, *recipe, "--", tmp_path, str(ROLLOUTS), limit=1800)
        ran.wait_for("checkpoints/step=3.ckpt")
        before = servers()
        os.kill(before[-1].pid, signal.SIGKILL)
        assert ran.finish() == 0, ran.output()
    syncs = lines(tmp_path / "syncs.jsonl")
    assert max(sync["apart"] for sync in syncs) <= 1e-4
    seen = {name for sync in syncs for name in sync["engines"]}
    assert len(seen) >= 2
    found = [
        sample for rank in range(2) for line in lines(tmp_path / f"rollouts-{rank}.jsonl") for sample in line["ids"]
    ]
    assert sorted(found) == list(range(ROLLOUTS * SAMPLES)), "every sample once"
