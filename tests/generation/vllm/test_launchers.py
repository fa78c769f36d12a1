"""One engine for each rank under Lightning's own launcher and SLURM, which do not set all variables."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import fake_vllm_rank
from kit.ranks import free_port

LIMIT = 240.0
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR")


def run(tasks: list[dict[str, str]], folder: Path) -> dict[int, Any]:
    """Run a process for each set of variables; return the saved values of each rank."""
    tests = Path(fake_vllm_rank.__file__).parents[1]
    shared = {name: value for name, value in os.environ.items() if name not in LAUNCHERS and "SLURM" not in name}
    shared |= {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, fake_vllm_rank.__file__, str(folder)],
            env={**shared, **task},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in tasks
    ]
    end = time.monotonic() + LIMIT
    try:
        said = [process.communicate(timeout=max(end - time.monotonic(), 1))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(tasks), said
    return {rank: torch.load(folder / f"{rank}.pt") for rank in range(2)}


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["python", "slurm"])
def test_each_rank_has_its_rank_and_its_gpu(launcher: str, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "rl", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NNODES": "1", "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
    srun = [{**job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    saved = run({"python": [{}], "slurm": srun}[launcher], tmp_path)
    for rank in range(2):
        assert saved[rank]["before"]["RANK"] is None, "expected the variables of this launcher alone"
        assert saved[rank]["built"] == [(rank, rank, torch.bfloat16)]
        assert saved[rank]["after"]["RANK"] is None
        assert saved[rank]["ranks"] == 2
