"""Storage of weights: folders of dead trainers are deleted, and servers load only from the storage."""

import os
import socket
from pathlib import Path

import pytest
import torch

from lightning_rl import VLLMServerEngine
from lightning_rl.generation.vllm.storage import WeightFolder, check_inside
from lightning_rl.generation.vllm.worker_extension import STORAGE, WeightLoader
from lightning_rl.generation.weights.weight_folder import write_weights


def left_behind(storage: Path, run: str = "old", host: str | None = None) -> Path:
    """Create what a killed trainer leaves, and return its folder."""
    folder = storage / f"lightning-rl-{run}"
    (folder / "0").mkdir(parents=True)
    (storage / f"lightning-rl-{run}.lock").write_text(socket.gethostname() if host is None else host)
    return folder


def test_folders_of_dead_trainers_are_deleted_and_those_of_live_ones_kept(tmp_path: Path) -> None:
    left_behind(tmp_path)
    alive, folder = WeightFolder(tmp_path, "alive"), WeightFolder(tmp_path, "next")
    alive.open()
    folder.open()
    names = ["lightning-rl-alive", "lightning-rl-alive.lock", "lightning-rl-next", "lightning-rl-next.lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:2]
    alive.close()


def test_an_engine_that_had_nothing_to_generate_deletes_the_folder_of_a_dead_trainer(tmp_path: Path) -> None:
    left_behind(tmp_path)
    VLLMServerEngine("http://127.0.0.1:1", storage=tmp_path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["another-machine", ""])
def test_folders_of_other_machines_and_of_starting_trainers_are_kept(host: str, tmp_path: Path) -> None:
    old = left_behind(tmp_path, host=host)
    folder = WeightFolder(tmp_path, "next")
    folder.open()
    assert (old / "0").is_dir()
    folder.close()


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o777)])
def test_private_weights_are_readable_by_this_user_only(private: bool, mode: int, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        folder = WeightFolder(tmp_path, "next", private=private)
        folder.open()
        assert folder.path.stat().st_mode & 0o777 == mode
        folder.close()
    finally:
        os.umask(umask)


def test_a_storage_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"expected storage= to be a folder that can be written to, got .*/file"):
        WeightFolder(tmp_path / "file", "next").open()


def test_a_server_loads_weights_only_from_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, outside = tmp_path / "storage", tmp_path / "out"
    for folder in (storage / "run" / "3", outside / "run" / "3"):
        write_weights([("w", torch.zeros(3))], folder)
    (storage / "link").symlink_to(outside / "run")
    (tmp_path / "named").symlink_to(storage)
    monkeypatch.setenv(STORAGE, str(storage))
    for path in (outside / "run" / "3", storage / "link" / "3", storage / ".." / "out" / "run" / "3"):
        answer = WeightLoader().lightning_rl_load(str(path))
        assert answer["error"].startswith(f"expected a folder of weights on {storage}, got ")
    check_inside(storage / "run" / "3", tmp_path / "named")
