"""docs/data.md is true: every block runs as pasted, and it names every kind of file and every option."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_rl import PromptDataModule
from lightning_rl.data.prompt_stream import CHECKED
from lightning_rl.data.sources import READERS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs_as_pasted(number: int) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[number], names)
    assert isinstance(names["data"], PromptDataModule)
    assert names["data"].fingerprint


def test_the_page_names_every_file_and_every_option() -> None:
    options = set(inspect.signature(PromptDataModule).parameters) - {"prompts", "validation", "validation_batch_size"}
    assert {suffix for suffix in READERS if suffix not in PAGE} == set()
    assert {option for option in options if not re.search(rf"\b{option}\b", PAGE)} == set()
    assert f"first {CHECKED}" in PAGE
