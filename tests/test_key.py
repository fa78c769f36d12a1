"""The key of a server: where it comes from, and who may read it."""

import os
import threading
from pathlib import Path

import pytest

from lightning_rl import VLLMServerEngine
from lightning_rl.configuration import describe
from lightning_rl.key import KEY, default_key_file, ensure_key_file, find_key, read_key


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(KEY, raising=False)


def a_file(folder: Path, text: str = "from-a-file\n", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_that_is_made_stays_the_same_and_is_nobody_elses() -> None:
    path = default_key_file()
    key = ensure_key_file(path)
    assert len(key) == 43 and ensure_key_file(path) == key == read_key(path), (
        "a server that starts again has it as well"
    )
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [other.name for other in path.parent.iterdir()] == ["api-key"]


def test_servers_that_start_together_agree_on_a_key() -> None:
    path, ready, keys = default_key_file(), threading.Barrier(8), list[str]()

    def start() -> None:
        ready.wait(20)
        keys.append(ensure_key_file(path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o666, 0o620, 0o602])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = a_file(tmp_path, mode=mode)
    with pytest.raises(ValueError, match=f"to be its owner's alone, got mode {mode:o}: chmod 600 {path}") as error:
        read_key(path)
    assert "from-a-file" not in str(error.value)


@pytest.mark.parametrize("text", ["", "two words", "two\nlines", "h\u00e9"])
def test_a_file_without_a_key_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to hold a key of printable ASCII without spaces, got something else"):
        read_key(a_file(tmp_path, text))
    with pytest.raises(ValueError, match=r"expected a file with a key at .*none"):
        read_key(tmp_path / "none")


def test_a_client_finds_the_key_where_the_server_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key(None) is None and find_key("") is None
    made = ensure_key_file(default_key_file())
    assert find_key(None) == made and find_key("") is None
    monkeypatch.setenv(KEY, "from-the-environment")
    assert find_key(None) == "from-the-environment"
    assert find_key("as-an-argument") == "as-an-argument"
    assert find_key(a_file(tmp_path)) == "from-a-file"
    with pytest.raises(ValueError, match="expected api_key to hold a key"):
        find_key("two words")


def test_the_key_of_an_engine_is_in_no_description_and_no_text(tmp_path: Path) -> None:
    for api_key in ("secret-0815", a_file(tmp_path, "secret-0815")):
        engine = VLLMServerEngine("http://127.0.0.1:1", api_key=api_key)
        assert "0815" not in f"{describe(engine)!r} {engine!r} {engine}"
    assert "0815" not in str(os.environ)
