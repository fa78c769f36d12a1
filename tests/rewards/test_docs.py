"""Every reward has a row, a block and a link in docs/rewards.md."""

import re
from pathlib import Path

import lightning_rl.rewards
from lightning_rl.rewards import AnswerMatch, Rewards, Sandbox, SandboxResult, SandboxService

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_every_reward_has_a_row_and_a_block() -> None:
    exported = {name: getattr(lightning_rl.rewards, name) for name in lightning_rl.rewards.__all__}
    parts = (AnswerMatch, Rewards, Sandbox, SandboxResult, SandboxService)
    names = {name for name, one in exported.items() if hasattr(one, "__dataclass_fields__") and one not in parts}
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)) == names
    assert {name for name in names if not any(f"{name}(" in block for block in BLOCKS)} == set()
    assert [link for link in re.findall(r"\]\((\.\.[^)]+)\)", text) if not (PAGE.parent / link).exists()] == []
