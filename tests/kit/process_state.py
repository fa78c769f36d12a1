"""State of a process that building an engine must not change."""

import gc
import os
import random
from importlib import import_module
from typing import Any

import numpy as np
import torch


def state_of_process() -> dict[str, Any]:
    """Return what vLLM changes in its process, and the generators."""
    return {
        "environment": dict(os.environ),
        "float32": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "compile_threads": import_module("torch._inductor.config").compile_threads,
        "dtype": torch.get_default_dtype(),
        "random": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "frozen": gc.get_freeze_count(),
    }
