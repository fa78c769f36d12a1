"""SLURM: the signal before a job's time is up, which saves at the end of a step and puts the job back into the queue.

Lightning saves inside of its signal handler, wherever the ranks are, and several ranks do not survive that.
"""

import os
import signal
import subprocess
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal by which SLURM tells that a job's time is nearly up, if the job is to be queued again."""
    environment = trainer._accelerator_connector.cluster_environment  # noqa: SLF001 - kept nowhere else
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return int(environment.requeue_signal or signal.SIGUSR1)


def requeue_path(trainer: Trainer) -> Path:
    """Where Lightning looks for a checkpoint when SLURM starts the job again."""
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))  # noqa: SLF001 - the same


def requeue() -> None:
    """Puts this job back into the queue; on the first rank alone."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as failure:
        rank_zero_warn(f"expected scontrol to queue job {job} again, got {failure}: queue it by hand")
    else:
        rank_zero_info(f"job {job} is in the queue again")
