"""A file or a folder is there whole or not at all."""

from pathlib import Path

import pytest

from lightning_rl.files import write_atomically


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
