"""The blocks of docs/rewards.md run as they stand there, and every reward has a row and a link."""

import re
from pathlib import Path

import pytest

import lightning_rl.rewards
from lightning_rl.rewards import AnswerMatch, Sandbox, SandboxResult, SandboxService, SandboxUnavailable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SLOW = "MathMatch"
EACH = [pytest.param(block, marks=pytest.mark.slow) if SLOW in block else block for block in BLOCKS]


@pytest.mark.parametrize("block", EACH, ids=lambda block: re.findall(r"import \(?\s*(\w+)", block)[0])
def test_a_block_runs_as_it_stands(block: str) -> None:
    try:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "pasted"})
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_every_reward_has_a_row_and_a_block() -> None:
    exported = {name: getattr(lightning_rl.rewards, name) for name in lightning_rl.rewards.__all__}
    parts = (AnswerMatch, Sandbox, SandboxResult, SandboxService)
    names = {name for name, one in exported.items() if hasattr(one, "__dataclass_fields__") and one not in parts}
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)) == names
    assert {name for name in names if not any(f"{name}(" in block for block in BLOCKS)} == set()
    assert [link for link in re.findall(r"\]\((\.\.[^)]+)\)", text) if not (PAGE.parent / link).exists()] == []
