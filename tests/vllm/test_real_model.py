"""vLLM generates for a pretrained language model: in the process of the trainer, and on a server that gets adapters."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import free_port
from kit.real_model import FOLDER, NEEDED, ShortFit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lightning_rl import VLLMEngine, VLLMServerEngine

pytestmark = [pytest.mark.nightly, NEEDED]

CACHE = 2**28


def adapted() -> Any:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "lightning_rl", "serve", str(FOLDER), "--port", str(port), "--dtype", "float32"]
    command += ["--", "--max-model-len", "512", "--kv-cache-memory-bytes", str(CACHE)]
    command += ["--enable-lora", "--max-lora-rank", "8"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "VLLM_API_KEY": "secret"}, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, tmp_path / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": "Bearer secret"})
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(request, timeout=5).close()
            return
        time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


def test_vllm_in_the_process_agrees_with_the_trainer() -> None:
    run = ShortFit(engine=VLLMEngine(max_model_len=512, kv_cache_memory_bytes=CACHE), rollouts=3)
    assert run.differences.max() < 2e-4 and len(run.metrics["kl/rollout"]) == 3


def test_a_server_gets_adapters_and_agrees_with_the_trainer(server: str) -> None:
    engine = VLLMServerEngine(server, lora="adapter", api_key="secret")
    run = ShortFit(engine=engine, policy=adapted, tokenizer=str(FOLDER), rollouts=3)
    assert run.differences.max() < 2e-4 and len(run.metrics["kl/rollout"]) == 3
