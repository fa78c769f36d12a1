"""Supported releases of vLLM, and its import."""

import os
import re
import sys
import warnings
from importlib import import_module
from typing import Any

import torch

WINDOW = ((0, 32), (0, 34))  # first supported release, and the first one beyond
BATCH_INVARIANT, INVARIANT_SINCE = "VLLM_BATCH_INVARIANT", (9, 0)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights can be passed to the engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads of this process also train
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def check_version(version: str) -> None:
    """Check that a release of vLLM is supported.

    Raises:
        ImportError: If it is not; names the supported range. Weight reload and version labels change between releases.
    """
    first, beyond = (".".join(map(str, bound)) for bound in WINDOW)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not WINDOW[0] <= (int(match[1]), int(match[2])) < WINDOW[1]:
        raise ImportError(f"expected vllm >= {first} and < {beyond}, got {version}: install vllm=={first}.*")


def set_batch_invariance() -> None:
    """Set vLLM's batch-invariant mode, which it reads when it is imported.

    Raises:
        ValueError: If the GPU does not support it, or vLLM was imported without it.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < INVARIANT_SINCE:
        got = "none" if capability is None else "{}.{}".format(*capability)
        raise ValueError(
            f"expected a GPU of compute capability {'{}.{}'.format(*INVARIANT_SINCE)} or later for "
            f"batch_invariant=True, got {got}: remove it"
        )
    if "vllm" in sys.modules and os.environ.get(BATCH_INVARIANT) != "1":
        raise ValueError(
            "expected batch_invariant=True before vLLM is imported, got a process that has imported it: set "
            f"{BATCH_INVARIANT}=1 before the process starts"
        )
    os.environ[BATCH_INVARIANT] = "1"


def load_vllm() -> Any:
    """Import vLLM after setting the environment that an engine in this process needs, and check its version.

    Variables that are already set are kept.

    Raises:
        ImportError: If vLLM is missing or not supported.
        RuntimeError: If the environment requires an engine in another process.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError(
            "expected VLLM_ENABLE_V1_MULTIPROCESSING=0, because weights are handed over within the process, got "
            + os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of vLLM's imports
        try:
            vllm = import_module("vllm")
            version = vllm.__version__
        except (ImportError, AttributeError) as error:  # a folder named vllm on the path has no version
            raise ImportError("expected vllm, which is not installed: pip install 'lightning-rl[vllm]'") from error
        check_version(version)
        import_module("vllm.entrypoints.llm")
    return vllm
