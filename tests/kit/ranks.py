"""Starts training processes on loopback as torchrun would, and the strategies as they run on a CPU."""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, Strategy
from typing_extensions import override

from kit.forks import PATH, Fork
from lightning_rl import FSDP2Strategy

TIMEOUT = timedelta(seconds=120)


class CPUFSDP(FSDPStrategy):
    """The same; Lightning refuses the very class without a GPU."""


class CPUDeepSpeed(DeepSpeedStrategy):
    """The same without Lightning's demand for a CUDA device."""

    @override
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    @property
    @override
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        with patch("deepspeed.comm.torch.build_shm_op", return_value=None):  # compiles C++ for a minute; gloo does too
            self._init_deepspeed_distributed()


def zero(stage: int) -> CPUDeepSpeed:
    """ZeRO of a stage, every parameter split however small."""
    split: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": False}
    config = {
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {**split, "stage3_param_persistence_threshold": 0},
    }
    return CPUDeepSpeed(config=config, process_group_backend="gloo")


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT),
    "fsdp1": lambda: CPUFSDP(process_group_backend="gloo", timeout=TIMEOUT, state_dict_type="sharded"),
    "fsdp2": lambda: FSDP2Strategy(process_group_backend="gloo", timeout=TIMEOUT, save_distributed_checkpoint=False),
    "tensor": lambda: FSDP2Strategy(
        tensor_parallel_size=2, process_group_backend="gloo", timeout=TIMEOUT, save_distributed_checkpoint=False
    ),
    "zero1": lambda: zero(1),
    "zero2": lambda: zero(2),
    "zero3": lambda: zero(3),
}


def free_port() -> int:
    """Return a free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: str | Path, ranks: int, *arguments: str | Path, timeout: float = 300) -> None:
    """Runs a script once for each rank of one process group; any that fails ends all."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "tests", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0",
        "PYTHONPATH": PATH,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = list[Fork]()
        try:
            for rank, output in enumerate(outputs):
                output.touch()
                environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(Fork(rank, [str(script), *map(str, arguments)], environment, output))
            end = time.monotonic() + timeout
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [output.read_text() for output in outputs]
    if any(codes) or None in codes:
        first = next((rank for rank, code in enumerate(codes) if code), codes.index(None) if None in codes else 0)
        pytest.fail(f"rank {first} of {ranks} ended with {codes[first]}:\n{said[first][-6000:]}", pytrace=False)
