"""Tasks as srun starts them: the signal before a job's time is up saves, queues the job once, and the next goes on."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from kit import killed_run
from kit.forks import PATH, Fork
from kit.ranks import free_port

TASKS, LIMIT, JOB = 2, 300.0, "4711"


def start(folder: Path, commands: Path) -> list[Fork]:
    """Start the tasks of a job, one process each, with the variables of SLURM."""
    shared = {
        **os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": PATH, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "rl", "SLURM_NTASKS": str(TASKS), "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": str(TASKS), "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0",
    }  # fmt: skip
    for name in ("started", *(f"result-{task}" for task in range(TASKS))):
        (folder / name).unlink(missing_ok=True)
    command, output = [killed_run.__file__, str(folder), "ddp", str(TASKS), "1"], folder / "output"
    output.touch()
    return [
        Fork(task, command, {**shared, "SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}, output)
        for task in range(TASKS)
    ]


def wait(tasks: list[Fork]) -> list[int]:
    end = time.monotonic() + LIMIT
    try:
        return [task.wait(end - time.monotonic()) for task in tasks]
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.nightly
def test_two_tasks_that_are_told_to_end_save_together_queue_the_job_once_and_go_on_bitwise(tmp_path: Path) -> None:
    commands, whole, job = tmp_path / "bin", tmp_path / "whole", tmp_path / "job"
    for folder in (commands, whole, job):
        folder.mkdir()
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$SLURM_PROCID $@" >> {tmp_path / "said"}\n')
    (commands / "scontrol").chmod(0o700)
    assert wait(start(whole, commands)) == [0] * TASKS
    assert not (tmp_path / "said").exists()
    tasks, end = start(job, commands), time.monotonic() + LIMIT
    try:
        while not (job / "step=3.ckpt").exists():
            assert all(task.poll() is None for task in tasks) and time.monotonic() < end
            time.sleep(0.01)
        for task in reversed(tasks):
            os.kill(task.pid, signal.SIGUSR1)
    finally:
        codes = wait(tasks)
    assert codes == [128 + signal.SIGUSR1] * TASKS and (tmp_path / "said").read_text() == f"0 requeue {JOB}\n"
    assert (job / "hpc_ckpt_1.ckpt").exists()
    assert wait(start(job, commands)) == [0] * TASKS
    for task in range(TASKS):
        expected, result = (torch.load(folder / f"result-{task}") for folder in (whole, job))
        assert result["steps"] == 16 and result["states"] == expected["states"]
        assert all(torch.equal(weight, expected["weights"][name]) for name, weight in result["weights"].items())
