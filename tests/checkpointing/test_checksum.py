"""Checksums: a flipped bit is refused or changes nothing, and a file that is not a checkpoint is refused by name."""

import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_policy

from lightning_rl import RLLightningModule
from lightning_rl.checkpointing import AtomicCheckpointIO, read_checkpoint
from lightning_rl.checkpointing.checksum import SUMS, Origin, check_whole, read_origin, write_sums

FLIPS = 25
REFUSED = r"expected a checkpoint.* got .*damaged\.ckpt"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a short run."""
    path = tmp_path_factory.mktemp("saved") / "whole.ckpt"
    fit(tiny_module(), limit_train_batches=1).save_checkpoint(path)
    return path


def test_a_checkpoint_has_a_run_and_a_step(checkpoint: Path, tmp_path: Path) -> None:
    origin = read_origin(checkpoint)
    assert origin is not None and len(origin.run) == 8 and origin[1:] == (1, True)
    torch.save([1], tmp_path / "list.ckpt")
    assert read_origin(tmp_path / "list.ckpt") == Origin("", -1)


@pytest.mark.nightly
def test_every_flipped_bit_of_a_small_file_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path, content = tmp_path / "damaged.ckpt", {"lightning_rl": {"run": "0123abcd"}, "weights": torch.arange(64.0)}
    AtomicCheckpointIO().save_checkpoint(content, path)
    whole, refused = path.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 23):
        flip(path, bit)
        try:
            found = read_checkpoint(path)
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            assert found["lightning_rl"] == content["lightning_rl"]
            assert torch.equal(found["weights"], content["weights"])
        path.write_bytes(whole)
    assert refused > len(whole) // 8  # a third of the flips; the others are in padding and unused fields
    check_whole(path)


@pytest.mark.parametrize("missing", [1, 10, 60, 2000])
def test_a_file_without_its_end_is_refused(missing: int, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(checkpoint.read_bytes()[:-missing])
    with pytest.raises(ValueError, match=r"got .*a\.ckpt, which is truncated, damaged or not"):
        check_whole(tmp_path / "a.ckpt")


def test_a_flip_in_the_weights_is_refused_by_resume_and_load(checkpoint: Path, tmp_path: Path) -> None:
    whole, draw, damaged = checkpoint.read_bytes(), random.Random(1), tmp_path / "damaged.ckpt"
    with zipfile.ZipFile(checkpoint) as archive:
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size]
    for entry in draw.sample(entries, FLIPS):
        begin = whole.index(entry.filename.encode(), entry.header_offset) + len(entry.filename)
        extra = int.from_bytes(whole[entry.header_offset + 28 :][:2], "little")
        damaged.write_bytes(whole)
        flip(damaged, draw.randrange(8 * (begin + extra), 8 * (begin + extra + entry.file_size)))
        with pytest.raises(ValueError, match=REFUSED) as refused:
            RLLightningModule.load_from_checkpoint(damaged, policy=tiny_policy, rewards=parity_reward)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=REFUSED):
        fit(tiny_module(), ckpt_path=damaged, max_epochs=2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "got the empty file"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "is truncated, damaged or not"),
        (lambda path: path.write_text("no checkpoint"), "is truncated, damaged or not a checkpoint"),
        (lambda path: torch.save([1, 2], path), "expected a checkpoint of an RLLightningModule"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "which cannot be read"),
    ],
    ids=["empty", "truncated", "text", "foreign", "empty archive"],
)
def test_a_file_that_is_not_a_checkpoint_is_refused(
    damage: Callable[[Path], Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.ckpt"
    shutil.copy(checkpoint, wrong)
    damage(wrong)
    for load in (
        lambda: fit(tiny_module(), ckpt_path=wrong, max_epochs=2),
        lambda: RLLightningModule.load_from_checkpoint(wrong, policy=tiny_policy, rewards=parity_reward),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            load()
        assert "\n" not in str(refused.value) and "wrong.ckpt" in str(refused.value)


def test_a_pipe_and_a_folder_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.ckpt").touch()
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert read_origin(tmp_path / "pipe.ckpt") is None and read_origin(tmp_path / "folder") is None
    for name, message in {
        "folder": r"expected a checkpoint, got the folder .*folder: resume from another checkpoint",
        "run": r"expected a checkpoint, got the folder .*run: pass one of a\.ckpt in it",
        "pipe.ckpt": r"expected a checkpoint, got .*pipe\.ckpt, which is a pipe or a device: resume from another",
    }.items():
        with pytest.raises(ValueError, match=message):
            fit(tiny_module(), ckpt_path=tmp_path / name)


def test_a_folder_has_the_checksums_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "sharded.ckpt"
    (folder / "inner").mkdir(parents=True)
    (folder / "one").write_bytes(b"one")
    (folder / "inner" / "two").write_bytes(b"two")
    write_sums(folder, {"lightning_rl": {"run": "0123abcd"}, "global_step": 7})
    assert read_origin(folder) == Origin("0123abcd", 7)
    check_whole(folder)
    for file in ("one", "inner/two"):
        whole = (folder / file).read_bytes()
        for bit in range(8 * len(whole)):
            flip(folder / file, bit)
            with pytest.raises(ValueError, match=rf"damaged file {folder / file} \(CRC-32 differs\)"):
                check_whole(folder)
            (folder / file).write_bytes(whole)
    (folder / "one").unlink()
    with pytest.raises(ValueError, match=r"expected a checkpoint, got .* without one"):
        check_whole(folder)
    (folder / SUMS).write_text("{}")
    assert read_origin(folder) is None
    with pytest.raises(ValueError, match="damaged file"):
        check_whole(folder)
