"""The window of vLLM releases that the engine is written for, and the import of one of them."""

import os
import re
import warnings
from importlib import import_module
from typing import Any

WINDOW = ((0, 32), (0, 34))  # first release, and the first one beyond; each end has been looked at
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, or weights could not be handed to it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads of this process also train
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def check_version(version: str) -> None:
    """Refuses a release of vLLM that this adapter was not written for.

    Raises:
        ImportError: naming the window. Weight reload and version labels have moved with most releases before it.
    """
    first, beyond = (".".join(map(str, bound)) for bound in WINDOW)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not WINDOW[0] <= (int(match[1]), int(match[2])) < WINDOW[1]:
        raise ImportError(f"expected vllm >= {first} and < {beyond}, got {version}: install vllm=={first}.*")


def load_vllm() -> Any:
    """The module ``vllm``, checked, with the environment that an engine in this process needs.

    Variables that are set already stay as they are.

    Raises:
        ImportError: if vLLM is missing or outside of the window.
        RuntimeError: if the environment asks for an engine in another process.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError(
            "expected VLLM_ENABLE_V1_MULTIPROCESSING=0, because weights are handed over within the process, got "
            + os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own imports
        try:
            vllm = import_module("vllm")
            version = vllm.__version__
        except (ImportError, AttributeError) as error:  # a folder of that name on the path has no version
            raise ImportError("expected vllm, which is not installed: pip install 'lightning-rl[vllm]'") from error
        check_version(version)
        import_module("vllm.entrypoints.llm")
    return vllm
