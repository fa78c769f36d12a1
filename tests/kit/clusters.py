"""Ray clusters of several nodes on this machine."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_rl import RayWorkers
from lightning_rl.processes.ray_pool import fleet_of

NODES = (2, 2, 2)
ROOT = Path(__file__).parents[2]
HELD = -1  # key of a pool that keeps workers alive between tests


@contextmanager
def start_cluster(cpus: Sequence[int] = NODES) -> Iterator[Any]:
    """Start a cluster with a node for each number of CPUs, the head first; ``RAY_ADDRESS`` points to it meanwhile."""
    ray, utils = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):  # sockets need short paths
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = utils.Cluster()
        for number in cpus:
            cluster.add_node(num_cpus=number, include_dashboard=False)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def workers_of(number: int) -> RayWorkers:
    """Return workers that stay between tests, and leave room for others."""
    workers = RayWorkers(number, cpus=0.1)
    fleet_of(workers).pools.add(HELD)
    return workers
