"""Served: ``lightning-rl serve`` in a separate process, for tests that kill a real server."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedModel

from kit.support import tiny_tokenizer

KEY = "VLLM_API_KEY"
SECRET = "a-key-for-tests"
PATIENCE = 600.0  # seconds: on two busy cores two servers take minutes to start
UNCHECKED = "from lightning_rl.cli import main, serve; serve.REFUSED = {}; main.main()"


class Served:
    """A model's configuration and a tokenizer in a folder, served at a port that stays the same after a restart.

    Args:
        model: whose configuration is served; its weights are not.
        folder: an empty one.
        options: for vLLM.
        unchecked: options for vLLM that the command would refuse.
        processor: of pictures, if the model reads them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        *,
        options: Sequence[str] = (),
        unchecked: Sequence[str] = (),
        processor: Any = None,
    ) -> None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        (processor or tiny_tokenizer()).save_pretrained(folder)
        self.flags = ["--pictures"] if processor is not None else []
        self.folder, self.options, self.unchecked = folder, options, unchecked
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts it; engines wait until it is ready."""
        command = [sys.executable, "-m", "lightning_rl", "serve", str(self.folder), "--port", str(self.port)]
        command += self.flags
        command += ["--dtype", "float32", "--", "--block-size", "32", "--max-num-seqs", "64"]
        command += ["--kv-cache-memory-bytes", str(2**26), *self.options]
        if self.unchecked:
            command[1:3] = ["-c", UNCHECKED]
            command += self.unchecked
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env={**os.environ, KEY: SECRET}, stdout=log, stderr=log)
        return self.process

    def wait(self, patience: float = PATIENCE) -> None:
        """Returns once it answers.

        Raises:
            RuntimeError: if it has ended; with the end of its log.
            TimeoutError: after ``patience`` seconds; with the end of its log.
        """
        request = urllib.request.Request(f"{self.url}/health", headers={"Authorization": f"Bearer {SECRET}"})
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self._log()}")
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(request, timeout=5).close()
                return
            time.sleep(0.2)
        raise TimeoutError(f"expected an answer of {self.url} within {patience:g} s: {self._log()}")

    def _log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

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
