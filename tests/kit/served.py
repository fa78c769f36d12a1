"""Served: ``lightning-rl serve`` in a process of its own, for tests that need a real server, and kill it."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from transformers import PreTrainedModel

from kit.support import tiny_tokenizer
from lightning_rl.generation.vllm.key import KEY

SECRET = "a-key-for-tests"
OPEN = [  # what vLLM 0.32 answers without its key, because it asks for one under /v1, /v2 and /inference alone
    "/abort_requests",
    "/classify",
    "/collective_rpc",
    "/detokenize",
    "/docs",
    "/finish_weight_update",
    "/get_world_size",
    "/health",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_paused",
    "/is_sleeping",
    "/load",
    "/metrics",
    "/openapi.json",
    "/pause",
    "/ping",
    "/pooling",
    "/redoc",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/score",
    "/server_info",
    "/sleep",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenize",
    "/update_weight_version",
    "/update_weights",
    "/version",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
]


class Served:
    """A model's configuration and a tokenizer in a folder, served at a port that stays the same after a restart.

    Args:
        model: whose configuration is served; its weights are not.
        folder: an empty one.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts it; engines wait until it is ready."""
        command = [sys.executable, "-m", "lightning_rl.cli", "serve", str(self.folder), "--port", str(self.port)]
        command += ["--dtype", "float32", "--", "--block-size", "32", "--max-num-seqs", "64"]
        command += ["--kv-cache-memory-bytes", str(2**26)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env={**os.environ, KEY: SECRET}, stdout=log, stderr=log)
        return self.process

    def family(self) -> list[psutil.Process]:
        """The process of the command and everything that it has started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def kill(self) -> list[psutil.Process]:
        """Kills the process of the command with SIGKILL; returns who is still there once it is over."""
        family = self.family()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return psutil.wait_procs(family, timeout=20)[1]

    def stop(self) -> tuple[int, list[psutil.Process]]:
        """Asks it to end; returns the exit code and who is still there."""
        with suppress(psutil.NoSuchProcess):
            family = self.family()
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait(60), psutil.wait_procs(family, timeout=20)[1]
        return self.process.wait(), []
