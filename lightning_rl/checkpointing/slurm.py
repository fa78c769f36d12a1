"""SLURM: the signal before a job's time limit saves at the end of a step and requeues the job.

Lightning saves inside of its signal handler, where the ranks may be at different places and hang.
"""

import os
import signal
import subprocess
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal that SLURM sends before the time limit, or None if the job is not requeued."""
    environment = trainer._accelerator_connector.cluster_environment  # noqa: SLF001 - kept nowhere else
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return int(environment.requeue_signal or signal.SIGUSR1)


def requeue_path(trainer: Trainer) -> Path:
    """Return the path where Lightning looks for a checkpoint when SLURM restarts the job."""
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))  # noqa: SLF001 - the same


def requeue() -> None:
    """Requeue this job, on the first rank only."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as failure:
        rank_zero_warn(f"expected scontrol to requeue job {job}, got {failure}: requeue it by hand")
    else:
        rank_zero_info(f"job {job} is requeued")
