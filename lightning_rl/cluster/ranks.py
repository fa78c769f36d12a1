"""Ranks of a recipe on a Ray cluster: Ray Train places them in groups of one node, and restarts them together."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from lightning_rl.cluster.nodes import GUARDED, free_port
from lightning_rl.processes.command import start_with_guard

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Ranks of a recipe: nodes 2, devices 8, as torchrun has them.

    Args:
        command: Recipe and its options, for Python.
        nodes: Number of groups of ranks, each on one node.
        devices: Number of ranks of a group.
        gpus: True for one GPU per rank.
        folder: Working directory.
        variables: Environment variables of the ranks, added to those of the node.
    """

    command: Sequence[str]
    nodes: int
    devices: int
    gpus: bool
    folder: Path
    variables: dict[str, str]

    @property
    def resources(self) -> dict[str, float]:
        """Resources of one group."""
        return dict.fromkeys(("CPU", "GPU") if self.gpus else ("CPU",), float(self.devices))

    def places(self, group: int, host: str, port: int) -> list[dict[str, str]]:
        """Return the variables of each rank of a group, as torchrun sets them, for the master at an address."""
        world = {"WORLD_SIZE": self.nodes * self.devices, "LOCAL_WORLD_SIZE": self.devices, "GROUP_RANK": group}
        world |= {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "lightning-rl"}
        numbers = [{"RANK": group * self.devices + place, "LOCAL_RANK": place} for place in range(self.devices)]
        return [{name: str(value) for name, value in {**world, **own}.items()} for own in numbers]

    def run(self, max_restarts: int) -> None:
        """Run the recipe to its end; if a rank or a node is lost, all ranks start again.

        Raises:
            ray.train.TrainingFailedError: If ranks failed more often than ``max_restarts``.
        """
        scaling = ScalingConfig(num_workers=self.nodes, resources_per_worker=self.resources, use_gpu=self.gpus)
        failures = FailureConfig(max_failures=max_restarts)
        with TemporaryDirectory(prefix="lightning-rl-ray-") as folder:  # for what Ray Train would keep in the home
            options = RunConfig(failure_config=failures, storage_path=folder, worker_runtime_env=GUARDED)
            trainer = DataParallelTrainer(
                run_group, train_loop_config=asdict(self), scaling_config=scaling, run_config=options
            )
            trainer.fit()


def run_group(config: dict[str, Any]) -> None:
    """Run one group of ranks, in a worker of Ray Train.

    Raises:
        ChildProcessError: If a rank fails.
    """
    ranks, group = Ranks(**config), get_context().get_world_rank()
    host = ray.util.get_node_ip_address()
    host, port = broadcast_from_rank_zero((host, free_port(host)) if group == 0 else None)
    command = [sys.executable, *ranks.command]
    with ExitStack() as running:
        processes = [
            running.enter_context(
                start_with_guard(command, {**os.environ, **ranks.variables, **variables}, cwd=ranks.folder)
            )
            for variables in ranks.places(group, host, port)
        ]
        while not any(codes := [process.poll() for process in processes]) and None in codes:
            time.sleep(POLL_SECONDS)
    if failed := [(place, code) for place, code in enumerate(codes) if code]:
        place, code = failed[0]
        raise ChildProcessError(f"rank {group * ranks.devices + place} failed (status {code}): see its log above")
