"""The blocks of docs/evaluation.md run as they stand, one after another."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # advice of Lightning about settings that a short page leaves out
def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 3
    folders = [
        tmp_path / "runs" / "lightning_logs" / "version_0" / "evaluations" / name for name in ("greedy", "pass8")
    ]
    written = ["step_000001", "step_000002", "step_000003", "step_000004", "test", "validate"]
    assert all(sorted(path.stem for path in folder.iterdir()) == written for folder in folders)
