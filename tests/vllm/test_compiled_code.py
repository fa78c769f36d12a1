"""Compiled code of vLLM: processes with the same policy look for it under the same name."""

import os
import subprocess
import sys
from pathlib import Path

HASH = """
import torch
from kit.engine_requests import launch
from kit.vllm_models import a_model
from lightning_rl import VLLMEngine

engine = VLLMEngine(canary=False, kv_cache_memory_bytes=2**25, block_size=32)
launch(engine, a_model())
print("hash:", engine._llm.llm_engine.vllm_config.compute_hash())
engine.close()
"""


def test_processes_with_the_same_policy_have_one_name_for_its_compiled_code(tmp_path: Path) -> None:
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HASH]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    hashes = [line for each in started for line in each.communicate()[0].splitlines() if line.startswith("hash:")]
    assert len(hashes) == 2 and len(set(hashes)) == 1
