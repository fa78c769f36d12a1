"""What audits write lies in a folder of the test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without ``default_root_dir`` write here."""
    monkeypatch.chdir(tmp_path)
