"""A file or a folder is there whole or not at all."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_rl.utils.atomic_write import write_atomically


def test_a_file_is_replaced_and_a_folder_appears(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_atomically(tmp_path / "file", lambda part, text=text: part.write_text(text))
        assert (tmp_path / "file").read_text() == text

    def write(part: Path) -> None:
        (part / "inner").mkdir(parents=True)
        (part / "inner" / "file").write_text("third")

    write_atomically(tmp_path / "folder", write)
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "third"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
@pytest.mark.parametrize("folder", [False, True])
def test_tensors_are_read_by_whom_the_umask_lets(tmp_path: Path, umask: int, mode: int, folder: bool) -> None:
    def write(part: Path) -> None:
        if folder:
            part.mkdir()
        save_file({"a": torch.zeros(2)}, part / "tensors" if folder else part)

    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "target", write)
    finally:
        os.umask(before)
    file = tmp_path / "target" / "tensors" if folder else tmp_path / "target"
    assert stat.S_IMODE(file.stat().st_mode) == mode and [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("inner", ["", "file"])
def test_what_fails_leaves_the_target_as_it_was_and_no_part(tmp_path: Path, inner: str) -> None:
    (tmp_path / "target").write_text("before")

    def fail(part: Path) -> None:
        if inner:
            part.mkdir()
        (part / inner).write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_atomically(tmp_path / "target", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
