"""The recipe of several turns learns with vLLM as it does with the embedded engine."""

from pathlib import Path

import pytest
from recipes.test_agent import run


@pytest.mark.nightly
def test_held_out_greedy_success_rises(tmp_path: Path) -> None:
    run(tmp_path, "--engine", "vllm")
