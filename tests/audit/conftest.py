"""Directory for files that audits write in tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary directory, where runs without ``default_root_dir`` write."""
    monkeypatch.chdir(tmp_path)
