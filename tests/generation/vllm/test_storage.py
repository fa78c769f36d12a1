"""Storage of weights: what a dead trainer left goes, what a living one has stays, and no path leads out of it."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rl.generation.vllm.storage import RunFolder, check_inside
from lightning_rl.generation.vllm.worker_extension import STORAGE, WeightLoader
from lightning_rl.generation.weights.weight_folder import INDEX, write_weights

TRAINER = """
import sys
from pathlib import Path
from lightning_rl.generation.vllm.storage import RunFolder
folder = RunFolder(Path(sys.argv[1]), sys.argv[2])
folder.open()
(folder.path / "0").mkdir()
print("open", flush=True)
sys.stdin.read()
"""


def trainer(storage: Path, run: str) -> "subprocess.Popen[str]":
    """A process that keeps weights, and lives until it is killed."""
    command = [sys.executable, "-c", TRAINER, str(storage), run]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


@pytest.mark.slow
def test_weights_of_a_killed_trainer_go_when_the_next_one_starts_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    with trainer(tmp_path, "dead") as dead, trainer(tmp_path, "alive") as alive:
        dead.send_signal(signal.SIGKILL)
        dead.wait(20)
        assert (tmp_path / "lightning-rl-dead" / "0").is_dir(), "nobody was there to remove them"
        folder = RunFolder(tmp_path, "next")
        folder.open()
        names = ["lightning-rl-alive", "lightning-rl-alive.lock", "lightning-rl-next", "lightning-rl-next.lock"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        folder.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == names[:2]
        alive.kill()


def left_behind(storage: Path, run: str = "old", host: str | None = None) -> Path:
    """What a trainer that was killed leaves."""
    folder = storage / f"lightning-rl-{run}"
    (folder / "0").mkdir(parents=True)
    (storage / f"lightning-rl-{run}.lock").write_text(socket.gethostname() if host is None else host)
    return folder


def test_what_was_left_behind_goes(tmp_path: Path) -> None:
    old = left_behind(tmp_path)
    folder = RunFolder(tmp_path, "next")
    folder.open()
    assert not old.exists() and folder.path.is_dir()
    folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["another-machine", ""])
def test_nothing_of_another_machine_and_nothing_that_only_begins_is_removed(host: str, tmp_path: Path) -> None:
    old = left_behind(tmp_path, host=host)
    folder = RunFolder(tmp_path, "next")
    folder.open()
    assert (old / "0").is_dir()
    folder.close()


def test_a_link_in_the_place_of_a_folder_leads_nowhere(tmp_path: Path) -> None:
    precious, storage = tmp_path / "precious", tmp_path / "storage"
    (precious / "data").mkdir(parents=True)
    left_behind(storage).joinpath("0").rmdir()
    (storage / "lightning-rl-old").rmdir()
    (storage / "lightning-rl-old").symlink_to(precious)
    (storage / "lightning-rl-more.lock").symlink_to(storage / "lightning-rl-old.lock")
    folder = RunFolder(storage, "next")
    folder.open()
    assert (precious / "data").is_dir()
    folder.close()


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o777)])
def test_in_a_folder_for_everybody_nobody_else_reads_the_weights(private: bool, mode: int, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        folder = RunFolder(tmp_path, "next", private=private)
        folder.open()
        assert folder.path.stat().st_mode & 0o777 == mode
        folder.close()
    finally:
        os.umask(umask)


def test_a_storage_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"expected storage= to be a folder that can be written to, got .*/file"):
        RunFolder(tmp_path / "file", "next").open()


def some_weights(storage: Path) -> Path:
    folder = storage / "lightning-rl-ab12" / "3"
    write_weights([("w", torch.zeros(3))], folder)
    return folder


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc",
        "lightning-rl-ab12/3",
        "{0}",
        "{0}/..",
        "{0}/other/3",
        "{0}/link/3",
        "{0}/lightning-rl-link/3",
        "{0}/lightning-rl-ab12",
        "{0}/lightning-rl-ab12/4",
        "{0}/lightning-rl-ab12/3/..",
        "{0}/lightning-rl-ab12/3/00000.safetensors",
        "{0}/lightning-rl-ab12/../../out/lightning-rl-ab12/3",
        "{0}/../out/lightning-rl-ab12/3",
    ],
)
def test_a_server_loads_nothing_from_outside_of_its_storage(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, outside = tmp_path / "storage", tmp_path / "out"
    for folder in (storage, outside, outside / "other"):
        some_weights(folder)
    (storage / "link").symlink_to(outside / "lightning-rl-ab12")
    (storage / "lightning-rl-link").symlink_to(outside / "lightning-rl-ab12")
    (storage / "lightning-rl-ab12" / "4").symlink_to(outside / "lightning-rl-ab12" / "3")
    monkeypatch.setenv(STORAGE, str(storage))
    answer = WeightLoader().lightning_rl_load(path.format(storage))
    assert answer["error"].startswith(f"expected a folder of weights on {storage}, got ")


def test_the_storage_may_be_named_by_a_link_to_it(tmp_path: Path) -> None:
    folder = some_weights(tmp_path / "storage")
    (tmp_path / "link").symlink_to(tmp_path / "storage")
    check_inside(folder, tmp_path / "storage")
    check_inside(folder, tmp_path / "link")
    check_inside(tmp_path / "link" / "lightning-rl-ab12" / "3", tmp_path / "link")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"../../../out/00000.safetensors": ["w"]}', "expected parts of .* itself in .*, got '../../../out/00000"),
        ('{"/etc/passwd": ["w"]}', "expected parts of .*, got '/etc/passwd'"),
        ('{"link.safetensors": ["w"]}', "expected parts of .*, got 'link.safetensors'"),
        ('{"00001.safetensors": ["w"]}', "expected parts of .*, got '00001.safetensors'"),
        ('{"00000.safetensors\\n": ["w"]}', "expected parts of .*, got"),
        ('{"00000.safetensors": [["w"]]}', "expected an index of weights in .*, got something else"),
        ('["00000.safetensors"]', "expected an index of weights in .*, got something else"),
        ("[" * 10**5, "expected an index of weights in .*, got a damaged file"),
        ("{", "expected an index of weights in .*, got a damaged file"),
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(
    index: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = some_weights(tmp_path)
    (folder / "00001.safetensors").symlink_to(folder / "00000.safetensors")
    (folder / "link.safetensors").symlink_to(folder / "00000.safetensors")
    (folder / INDEX).write_text(index)
    monkeypatch.setenv(STORAGE, str(tmp_path))
    error = WeightLoader().lightning_rl_load(str(folder))["error"]
    assert re.match(message, error), error
